# SPDX-License-Identifier: Apache-2.0
"""Sources of wiki pages and the texts that readers of the pages see."""

import random

import pytest

from megatron.corpus.wikitext import WikiSite, choose_variant, plain_text, without_notes

pytest.importorskip("mwparserfromhell", reason="pip install '.[corpus]'")

CASES = {
    "'''Bold''' and ''italic'' and '''''both'''''.": "Bold and italic and both.",
    "[[Paris]], [[Paris|the city]], [[Dog]]s, [[:Category:Cats]], [[a_b]]": "Paris, the city, Dogs, Category:Cats, a b",
    "A[[File:x.jpg|thumb|A [[nested]] caption]]B[[Category:C]]C[[fr:Paris]]D[[Image:y.png]]": "ABCD",
    "[[Terminator 2: Judgment Day]]": "Terminator 2: Judgment Day",
    "[http://a.org a site] [http://b.org] http://c.org": "a site http://c.org",
    "One.<ref>note {{cite|a}}</ref> Two.<ref name=x/> Three.<!-- no -->": "One. Two. Three.",
    "{{Infobox|a={{b|c}}\n|d=e}}Text": "Text",
    "Text\n{| class=x\n|-\n| cell {{t}}\n|}\nmore": "Text\n\nmore",
    "{{lang|fr|mot juste}} ({{lang-grc|logos}})": "mot juste (logos)",
    "{{convert|5|km|mi}} {{convert|5|to|10|kg}}": "5 km 5 to 10 kg",
    "{{nihongo|Tokyo|kanji|romaji}} {{frac|1|2}} {{frac|3|1|4}} {{nowrap|a b}}": "Tokyo (kanji, romaji) 1/2 3 1/4 a b",
    "The name ({{IPAc-en|x}}; born 1900) is ({{unknown}}).": "The name (born 1900) is.",
    "== A ==\ntext\n=== Empty ===\n== B ==\nmore\n== References ==\n* a\n=== Sub ===\nx\n== C ==\nend": (
        "A\n\ntext\n\nB\n\nmore\n\nC\n\nend"
    ),
    "== Only a heading ==": "",
    "intro\n\n\nsecond\nline": "intro\n\nsecond\nline",
    "* one\n** two ''three''\n# four\n: five\n; six : seven": "- one\n- two three\n- four\nfive\nsix: seven",
    "x<br/>y<small>z</small><gallery>\nFile:a.jpg\n</gallery> w<sup>2</sup>": "x\nyz w2",
    "<math>\\frac{{a}}{b'' | c}</math> and f''s": "$\\frac{{a}}{b'' | c}$ and fs",
    "<nowiki>[[not a link]] '''</nowiki> {{=}}": "[[not a link]] ''' =",
    "a &amp; b &lt;c&gt; &nbsp;d &#xD800;&eacute;": "a & b <c> d \u00e9",
    "<pre>\n  kept   blanks\n</pre>": "  kept   blanks",
    "<blockquote>said</blockquote>after {{quote|words|who}}": "said\n\nafter\n\nwords",
    "__NOTOC__ text __TOC__": "text",
    "#REDIRECT [[X]]": "- REDIRECT X",
    "{{unclosed|a [[b|c]] text": "unclosed|a c text",
    "-{zh-hans:\u8ba1\u7b97;zh-hant:\u96fb\u8166;}-[[\u6587\u4ef6:a|x]][[\u5206\u7c7b:y]]\u597d": "\u8ba1\u7b97\u597d",
    "== \u53c2\u8003\u6587\u732e ==\n* x\n== \u5386\u53f2 ==\n\u6587": "\u5386\u53f2\n\n\u6587",
    "\u6587\uff08{{lang-en|}}\uff0c\u5b57\uff09": "\u6587\uff08\u5b57\uff09",
    "mark\x01 \x02of \x0eours": "mark of ours",
    "": "",
}


@pytest.mark.parametrize("source", CASES)
def test_what_a_reader_sees(source):
    assert plain_text(source) == CASES[source]


def test_lists_can_be_left_out():
    assert plain_text("text\n* one\n* two\nmore", WikiSite(lists=False)) == "text\nmore"


def test_notes_and_comments():
    assert without_notes("a<ref>b<!-- </ref> c") == "a c"
    assert without_notes("a<!-- b <ref> --> c</ref>") == "a c</ref>"
    assert without_notes("a<REF name='x' >b</Ref >c<references/>") == "ac<references/>"
    assert without_notes("open <ref>to the end") == "open "
    assert len(without_notes("<ref name=a>" * 200_000 + "</ref>x")) == 1


def test_scripts_of_chinese():
    assert choose_variant("-{zh-tw:A; zh-cn:B}- -{C}- -{T|D}- -{zh-hant:E}- -{-|zh-cn:F}-") == "B C  E "
    assert choose_variant("-{" * 50_000) == "-{" * 50_000


PIECES = """{{ }} [[ ]] | = == * <ref> </ref> <div> </div> {| |- |} '' ''' <!-- --> -{ }-
    http://a &amp; &#x a <math> </math> <nowiki> <br
    /> \x01 \x0e {{{ }}} convert lang| zh-hans: ; : #""".split()


def test_any_markup_gives_a_text():
    """Pieces of markup in any order: nothing is raised, and marks of ours do not come out."""
    choice = random.Random(2)
    for _ in range(300):
        source = "".join(choice.choice([*PIECES, "\n", " "]) for _ in range(choice.randrange(1, 40)))
        text = plain_text(source)
        assert text == text.strip("\n") and not set(text.encode()) & set(range(9)), repr(source)
