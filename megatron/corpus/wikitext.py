# SPDX-License-Identifier: Apache-2.0
"""Convert the source of a wiki page to plain text: keep paragraphs, headings and lists; remove tables, notes, pictures.

    plain_text("'''Anarchism''' is a [[political philosophy|philosophy]].<ref>A note</ref>")
    'Anarchism is a philosophy.'

mwparserfromhell builds the tree. Templates are removed with their contents, except those that replace words of a sentence
(`{{lang|fr|mot}}`, `{{convert|5|km}}`, `{{formatnum:3}}`; see wikitext_templates.py). Formulas stay, between dollars.
Paragraphs are separated by blank lines; a heading is a line of its own; list items begin with "- ". Empty sections, and
those of sources and links, are removed.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from megatron.corpus.wikitext_templates import MAGIC_WORDS, TEMPLATES, TITLES, WORDS, Arguments, magic_word

# Marks in intermediate text: characters that XML forbids, so that no page contains them.
HEADING, ITEM, BREAK, TERM = "\x01", "\x02", "\x03", "\x04"  # kinds of lines; separator of a term and its meaning
FIRST = "\x05"  # the first argument of a magic word follows
LITERAL = str.maketrans("{}[]|' ", "\x0e\x0f\x10\x11\x12\x13\x14")  # escapes markup characters in formulas and code
AS_WRITTEN = str.maketrans("\x0e\x0f\x10\x11\x12\x13\x14", "{}[]|' ")


@dataclass(frozen=True)
class WikiSite:
    """Options of a wiki for the conversion of its pages. Words in lower case."""

    files: frozenset[str] = frozenset(WORDS["files"])  # namespaces of pictures and sounds
    categories: frozenset[str] = frozenset(WORDS["categories"])
    sections_of_links: frozenset[str] = frozenset(WORDS["sections of links"])
    lists: bool = True  # keep items of lists
    language: str = "en"  # decides how numbers are written
    title: str = ""  # of the present page


def plain_text(source: str, site: WikiSite = WikiSite(), title: str = "") -> str:  # noqa: B008  # it cannot be changed
    """The text of a page; may be empty."""
    import mwparserfromhell

    site = replace(site, title=title)
    source = choose_variant(without_notes(source.translate(_NOT_OURS)))
    source = _LINK_IN_MAGIC_WORD.sub(rf"\1{FIRST}|", source)
    tree = mwparserfromhell.parse(source, skip_style_tags=True)
    return _laid_out(_render(tree, site), site).translate(AS_WRITTEN).replace(f"{FIRST}|", "")


_NOT_OURS = dict.fromkeys([*AS_WRITTEN, *map(ord, (HEADING, ITEM, BREAK, TERM, FIRST))])
# The parser takes `{{lc:[[A]]}}` for text: names of templates have no links. With `|` it is an argument.
_LINK_IN_MAGIC_WORD = re.compile(rf"(\{{\{{\s*(?:{'|'.join(MAGIC_WORDS)})\s*:)(?=[^|{{}}]*\[\[)", re.IGNORECASE)
_NOTE = re.compile(r"(<!--)|(-->)|(<ref\b[^<>]*/\s*>)|(<ref\b[^<>]*>)|(</ref\s*>)", re.IGNORECASE)


def without_notes(source: str) -> str:
    """The source without comments and notes, which are a third of it. An unclosed one extends to the end.

    >>> without_notes("a<!-- <ref> --> b<ref name=x>c</ref> d<ref name=x />.")
    'a b d.'
    """
    kept, at, inside = [], 0, ""
    for match in _NOTE.finditer(source):
        begins_comment, ends_comment, whole, begins, ends = match.groups()
        if inside:
            if inside == "comment" and ends_comment or inside == "note" and ends:
                inside, at = "", match.end()
            continue
        if ends_comment or ends:
            continue  # an end without a beginning stays
        kept.append(source[at : match.start()])
        at = match.end()
        inside = "comment" if begins_comment else "note" if begins else ""
    return "".join(kept) + ("" if inside else source[at:])


_VARIANT = re.compile(r"-\{([^{}]*)\}-")
_SIMPLIFIED = ("zh-hans", "zh-cn", "zh-sg", "zh")


def choose_variant(source: str) -> str:
    """Choose one script where Chinese pages have several: simplified Chinese if present, else the first.

    >>> choose_variant("-{zh-hans:Jisuanji; zh-hant:Diannao}- -{as it is}- -{H|zh-cn:a;zh-tw:b}-.")
    'Jisuanji as it is .'
    """
    return _VARIANT.sub(lambda match: _chosen(match[1]), source) if "-{" in source else source


def _chosen(text: str) -> str:
    flags, bar, words = text.rpartition("|")
    if bar and set(re.split(r"[;\s]+", flags.strip())) & set("HT-"):
        return ""  # a rule for the page or its title, or the end of a rule
    by_script = dict(
        (part.partition(":")[0].strip(), part.partition(":")[2].strip())
        for part in words.split(";")
        if re.match(r"\s*zh(-\w+)*\s*:", part)
    )
    if not by_script:
        return words
    return next((by_script[script] for script in _SIMPLIFIED if script in by_script), next(iter(by_script.values())))


# ---- the tree ----------------------------------------------------------------------------------------------------------


def _render(nodes, site: WikiSite) -> str:
    """The text of nodes, with marks at the beginning of lines that are not paragraphs."""
    return "".join(_RENDER[type(node).__name__](node, site) for node in nodes.nodes) if nodes is not None else ""


def _heading(node, site: WikiSite) -> str:
    return f"\n{HEADING}{node.level}{_render(node.title, site).strip()}\n"


def _wikilink(node, site: WikiSite) -> str:
    title = str(node.title).strip()
    space, colon, _ = title.partition(":")
    if colon and space:
        space = space.strip().lower()
        if space in site.files or space in site.categories:
            return ""
        if node.text is None and re.fullmatch(r"[a-z]{2,3}(-[a-z]+)*|simple", title.partition(":")[0]):
            return ""  # the same page in another language
    if node.text is not None:
        return _render(node.text, site)
    return title.lstrip(":").replace("_", " ")


def _external_link(node, site: WikiSite) -> str:
    if not node.brackets:
        return str(node.url)
    return "" if node.title is None else _render(node.title, site).strip()


def _entity(node, site: WikiSite) -> str:
    try:
        return node.normalize().translate(_NOT_OURS).encode("utf-8", "ignore").decode()
    except (ValueError, OverflowError):
        return ""  # not a character


DROPPED = frozenset(
    """ref references table gallery imagemap timeline score graph mapframe maplink templatestyles indicator categorytree
    inputbox style script hiero section noinclude includeonly audio video chart""".split()
)
BLOCKS = frozenset("p div blockquote center poem ul ol dl pre source syntaxhighlight".split())


def _tag(node, site: WikiSite) -> str:
    name = str(node.tag).strip().lower()
    if name in DROPPED:
        return ""
    if name == "br":
        return "\n"
    if node.wiki_markup is not None and name in ("li", "dt", "dd"):
        return ITEM if name == "li" else TERM
    if name in ("math", "chem", "ce"):
        return _formula(str(node.contents or ""))
    text = _render(node.contents, site)
    if name in ("nowiki", "pre", "source", "syntaxhighlight"):
        text = text.translate(LITERAL)
    if name in BLOCKS:
        return f"\n{BREAK}\n{text}\n{BREAK}\n"
    return f"\n{ITEM}{text}" if name == "li" else text


def _formula(source: str) -> str:
    formula = " ".join(source.split())
    return f"${formula}$".translate(LITERAL) if formula else ""


_PREFIX = re.compile(r"^\s*(?:(?:safe)?subst|template)\s*:\s*", re.IGNORECASE)


def _template(node, site: WikiSite) -> str:
    whole = _PREFIX.sub("", _render(node.name, site), count=1)
    name = " ".join(whole.replace("_", " ").split()).lower()
    if ":" in name:
        first = whole.partition(":")[2].strip()
        words = [] if first == FIRST else [first]
        words += [f"{one.name}=" * one.showkey + _render(one.value, site) for one in node.params]
        return magic_word(name.partition(":")[0].strip(), words, site.language)
    if name in TITLES:
        return site.title
    if name == "tmath":
        return _formula(str(node.params[0].value)) if node.params else ""
    if re.fullmatch(r"lang-[a-z-]{2,12}", name):
        return _arguments(node, site)["1"]
    if name not in TEMPLATES:
        return ""
    text = TEMPLATES[name](_arguments(node, site), site.language)
    return f"\n{BREAK}\n{text}\n{BREAK}\n" if name in PARAGRAPHS else text


def _arguments(node, site: WikiSite) -> Arguments:
    return Arguments((str(one.name).strip(), _render(one.value, site).strip()) for one in node.params)


PARAGRAPHS = frozenset((*WORDS["quotations"], *WORDS["blocks"]))


_RENDER: dict[str, Callable] = dict(
    Text=lambda node, site: node.value,
    Heading=_heading,
    Wikilink=_wikilink,
    ExternalLink=_external_link,
    HTMLEntity=_entity,
    Tag=_tag,
    Template=_template,
    Comment=lambda node, site: "",
    Argument=lambda node, site: "" if node.default is None else _render(node.default, site),
)


# ---- lines -------------------------------------------------------------------------------------------------------------

_LEFTOVERS = (  # markup that the parser did not understand, and punctuation around removed templates
    (re.compile(r"'{2,5}"), ""),
    (re.compile(r"__[A-Z]{3,}__"), ""),
    (re.compile(r"\{\{|\}\}|\[\[|\]\]|\{\||\|\}"), ""),
    (re.compile(r"[^\S\n]+"), " "),
    (re.compile(r"([(\uff08\[])[ ,;:\uff0c\uff1b\uff1a\u3001]+"), r"\1"),
    (re.compile(r"[ ,;:\uff0c\uff1b\uff1a\u3001]+([)\uff09\]])"), r"\1"),
    (re.compile(r" ?\(\)| ?\[\]|\uff08\uff09"), ""),
    (re.compile(r" +([.,;:?!)])(?=\s|$)"), r"\1"),
)
_OF_A_TABLE = re.compile(r"\{\||\|[-}]?|!!")  # at the beginning of a line


def _laid_out(text: str, site: WikiSite) -> str:
    """The final text from marked lines: sections, paragraphs, items."""
    blocks: list[tuple[int, str]] = []  # (level of a heading or 0, text)
    paragraph: list[str] = []

    def end() -> None:
        if paragraph:
            blocks.append((0, "\n".join(paragraph)))
            paragraph.clear()

    for line in text.split("\n"):
        items = line.lstrip(TERM).startswith(ITEM)
        if line.startswith(HEADING):
            end()
            blocks.append((int(line[1]), _tidy(line[2:])))
            continue
        line = _tidy(line.replace(ITEM, "").replace(BREAK, "").lstrip(TERM).replace(TERM, ": "))
        if not line or _OF_A_TABLE.match(line):
            if not items:
                end()
        elif not items:
            paragraph.append(line)
        elif site.lists:
            paragraph.append(f"- {line}")
    end()
    return "\n\n".join(_sections(blocks, site))


def _tidy(line: str) -> str:
    for pattern, by in _LEFTOVERS:
        line = pattern.sub(by, line)
    return line.strip().strip("\u3000")


def _sections(blocks: list[tuple[int, str]], site: WikiSite) -> list[str]:
    """The blocks without sections of links, and without headings of empty sections."""
    kept: list[tuple[int, str]] = []
    above = 0  # level of a section of links, which is removed with its subsections
    for level, text in blocks:
        if level:
            if above and level > above:
                continue
            above = level if text.lower() in site.sections_of_links else 0
            while kept and kept[-1][0] >= level:
                kept.pop()  # an empty section
        if not above:
            kept.append((level, text))
    while kept and kept[-1][0]:
        kept.pop()
    return [text for _, text in kept]
