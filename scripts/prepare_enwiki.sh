#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# A Wikipedia dump to token files: download -> plain texts -> ftfy -> tokens -> one dataset. A second call goes on where the
# first one stopped. Needs pip install '.[corpus]'. Packages, vocabulary and network are checked before anything is made.
#
#   bash scripts/prepare_enwiki.sh --output data/enwiki --vocab-file gpt2-vocab.json --merge-file gpt2-merges.txt
#   bash scripts/prepare_enwiki.sh --dump enwiki-sample.xml.bz2 --output data/sample --vocab-file ...   a file that is here
#   bash scripts/prepare_enwiki.sh --language zh --output data/zhwiki --tokenizer-type ...              another Wikipedia
#
#   --workers N  processes (default: one per core);  --no-clean  without ftfy
#   Other flags go to preprocess_data.py. PYTHON=/path/to/python chooses an interpreter.
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$ROOT/scripts/_python.sh"
export PYTHONPATH=$ROOT${PYTHONPATH:+:$PYTHONPATH}

fail() {
    printf 'error: %s\n  -> %s\n' "$1" "$2" >&2
    exit "${3:-2}"
}
value() { [ -n "${2:-}" ] || fail "$1 needs a value" "bash scripts/prepare_enwiki.sh --help"; }

DUMP='' OUTPUT=data/enwiki LANGUAGE=en WORKERS=$(nproc) CLEAN=1 flags=()
while [ $# -gt 0 ]; do
    case $1 in
        --dump) value "$@"; DUMP=$2; shift ;;
        --output) value "$@"; OUTPUT=$2; shift ;;
        --language) value "$@"; LANGUAGE=$2; shift ;;
        --workers) value "$@"; WORKERS=$2; shift ;;
        --no-clean) CLEAN=0 ;;
        -h | --help) sed -n '3,11s/^# \{0,1\}//p' "$0"; exit ;;
        *) flags+=("$1") ;;
    esac
    shift
done
[[ $LANGUAGE =~ ^[a-z_]+$ ]] || fail "--language $LANGUAGE is no name of a Wikipedia" "en, zh, simple ..."
[[ $WORKERS =~ ^[1-9][0-9]*$ ]] || fail "--workers $WORKERS is no number of processes" "--workers 4"
[ -z "$DUMP" ] || [ -f "$DUMP" ] || fail "--dump $DUMP: no such file" "give a dump, or leave --dump out: it is downloaded"
NAME=${LANGUAGE}wiki
URL=https://dumps.wikimedia.org/$NAME/latest/$NAME-latest-pages-articles.xml.bz2
DUMP=${DUMP:-$OUTPUT/$NAME-latest-pages-articles.xml.bz2}
made() { [ -e "$1" ] && echo "  already there: $1"; }

check() { # what a download of hours would otherwise end at
    local packages=(mwparserfromhell) missing
    [ "$CLEAN" = 0 ] || packages+=(ftfy)
    missing=$("$PYTHON" -c 'import sys; from importlib.util import find_spec
print(*(name for name in sys.argv[1:] if find_spec(name) is None))' "${packages[@]}")
    [ -z "$missing" ] || fail "missing packages: $missing" "pip install '.[corpus]'" 3
    trial=$(mktemp -d)
    trap 'rm -rf "$trial"' EXIT
    "$PYTHON" "$ROOT/preprocess_data.py" --input - --output-prefix "$trial/one" --append-eod --workers 1 \
        ${flags[@]+"${flags[@]}"} <<<'{"id": "1", "revid": "1", "url": "1", "title": "1", "text": "1"}' >/dev/null
    [ -f "$DUMP" ] || curl --fail --head --location --silent --show-error --retry 2 --max-time 60 "$URL" >/dev/null ||
        fail "$URL cannot be had" "check the network and --language, or give a file: --dump FILE" 4
}

[ -e "$OUTPUT/${NAME}_text_document.idx" ] || check
mkdir -p "$OUTPUT"

echo "[1/5] The dump"
[ -f "$DUMP" ] || {
    curl --fail --location --continue-at - --retry 5 --output "$DUMP.part" "$URL"
    mv "$DUMP.part" "$DUMP"
}
echo "  $DUMP"

echo "[2/5] Plain texts"
made "$OUTPUT/text" ||
    "$PYTHON" -m megatron.tools.wiki "$DUMP" --output "$OUTPUT/text" --json --bytes 64M --workers "$WORKERS"

echo "[3/5] Broken characters mended (ftfy)"
texts=$OUTPUT/text
if [ "$CLEAN" = 1 ]; then
    texts=$OUTPUT/clean
    for folder in "$OUTPUT"/text/*/; do
        letters=$(basename "$folder")
        made "$texts/$letters" || {
            rm -rf "$texts/.$letters" # of a call that was stopped
            "$PYTHON" -m megatron.tools.openwebtext.cleanup_fix_dataset --input-files "$folder"wiki_* \
                --tasks ftfy_fix_text --output-path "$texts/.$letters" --workers "$WORKERS" --log-interval 100000
            rm -f "$texts/.$letters"/*_filtered*
            mv "$texts/.$letters" "$texts/$letters"
        }
    done
fi

echo "[4/5] Tokens, a dataset for each folder of texts"
mkdir -p "$OUTPUT/tokens"
for folder in "$texts"/*/; do
    letters=$(basename "$folder")
    made "$OUTPUT/tokens/${letters}_text_document.idx" ||
        "$PYTHON" "$ROOT/preprocess_data.py" --input "$folder" --output-prefix "$OUTPUT/tokens/$letters" --append-eod \
            --workers "$WORKERS" --log-interval 100000 ${flags[@]+"${flags[@]}"}
done

echo "[5/5] One dataset"
made "$OUTPUT/${NAME}_text_document.idx" ||
    "$PYTHON" "$ROOT/merge_datasets.py" --input "$OUTPUT/tokens" --output-prefix "$OUTPUT/${NAME}_text_document"
echo "Train with: --data-path $OUTPUT/${NAME}_text_document"
