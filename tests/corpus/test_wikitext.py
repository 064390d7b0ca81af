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


# Templates and magic words -> what their pages show, here and in Help:Magic words of mediawiki.org.
MINUS, TIMES = "\u2212", "\u00d7"
WORDS = {
    "{{formatnum:3}}&nbsp;\u00b0C, {{formatnum:-10}}&nbsp;\u00b0C": f"3 \u00b0C, {MINUS}10 \u00b0C",
    "{{formatnum:987654321.654321}} {{formatnum:987654321.654321|NOSEP}}": "987,654,321.654321 987654321.654321",
    "{{formatnum:987,654,321.654321|R}} {{FORMATNUM:00001}} {{formatnum:a 1234 b}}": "987654321.654321 00,001 a 1,234 b",
    "{{formatnum:{{formatnum:12345}}|R}} {{formatnum:[[12345]]}} {{subst:formatnum:1234}}": "12345 12,345 1,234",
    "{{lc:DATA CENTER}} {{uc:text}} {{lcfirst:DATA}} {{ucfirst:text|x}} {{lc:[[A|B]] C}}": "data center TEXT dATA Text b c",
    "{{padleft:xyz|5}} {{padleft:xyz|8|abcd}} {{padright:xyz|5|_}} {{padleft:|3|ab}}": "00xyz abcdaxyz xyz__ aba",
    "{{plural:1|is|are}} {{PLURAL: 2 |is|are}} {{plural:12|12=dozen|one|more}}": "is are dozen",
    "{{#if: x |a|b}}{{#if:|a|b}} {{#ifeq: a|a |yes|no}} {{#switch: b |a=1|b|c=2|3}} {{#switch:z|a=1|3}}": "ab yes 2 3",
    "'''{{PAGENAME}}''' and {{grammar:genitive|word}}": "Title and word",
    "{{val|1.5|u=kg}} {{val|1.2|0.1|e=3|u=m|up=s}} {{val|50|u=%}}": f"1.5 kg (1.2 \u00b1 0.1) {TIMES} 10^3 m/s 50%",
    "{{val|12345|fmt=commas|ul=[[metre|m]]}} {{val|5|+1|-2}} {{val| 1=7 | u=m&nbsp;s }}": f"12,345 m 5 +1 {MINUS}2 7 m s",
    "{{convert|5|ft|2|in|cm}} {{convert|10|km|mi|0}} {{convert|5|km|0}}": "5 ft 2 in 10 km 5 km",
    "{{convert|3|x|4|x|5|m|ft}} {{convert|2|-|3|km2}} {{convert|-5|C}}": (
        f"3 {TIMES} 4 {TIMES} 5 m 2\u20133 km\u00b2 -5 \u00b0C"
    ),
    "5.98{{e|24}} {{ordinal|3}} {{ordinal|12}} {{US$|2 billion}}": f"5.98 {TIMES} 10^24 3rd 12th US$2 billion",
    "at {{coord|13|19|N|169|9|W|type:event}} or {{coord|13.3|-169.1}}{{coord|1|N|2|E|display=title}}": (
        "at 13\u00b019\u2032N 169\u00b09\u2032W or 13.3\u00b0N 169.1\u00b0W"
    ),
    "{{As of|2010|5|3}}, {{as of|2010|lc=y}}, {{birth date|1900|1|2}}": "As of 3 May 2010, as of 2010, 2 January 1900",
    "{{gaps|1|234|567}} {{height|ft=5|in=6}} {{height|m=1.75}} 5{{\u00b1|1}} 2{{x10^|5}} {{radic|2}} {{deg|7|C}}": (
        f"1 234 567 5 ft 6 in 1.75 m 5\u00b11 2{TIMES}10^5 \u221a2 7\u00b0C"
    ),
    "{{not a typo|teh}} {{color|red|warm}} {{centered pull quote|as said}}": "teh warm\n\nas said",
    "{{circa|1900|1910}} {{OldStyleDate|May 2|1905|April 19}}": "c. 1900\u20131910 May 2 [O.S. April 19] 1905",
    "said {{blockquote|text=a ''notable'' [[x|work]] of {{val|3|u=kg}}|author=G}} and {{quote|1=x = y|2=z}}": (
        "said\n\na notable work of 3 kg\n\nand\n\nx = y"
    ),
    "{{USS|Hornet|CV-12}} {{HMS|Ajax|22|6}} {{sclass|Nimitz|carrier}}": "USS Hornet (CV-12) HMS Ajax Nimitz-class carrier",
    "{{IPA|fr|mo}} {{IPA|/a/}} {{harvtxt|A|B|C|1999}} {{nowrap|1=E = mc}}": "mo /a/ A, B & C (1999) E = mc",
    "{{columns-list|colwidth=9em|\n* a\n* b\n}}{{hlist|c|d}}": "- a\n- b\n\nc \u00b7 d",
    "{{tmath|\\frac{a}{b} }} {{sic}} {{langx|de|Wort}} {{Template:nobr|a b}}": "$\\frac{a}{b}$ [sic] Wort a b",
    "a {{unknown|1}}{{CURRENTYEAR}}{{#expr:1+2}}{{#invoke:x|y}}{{#tag:ref|x}}{{DEFAULTSORT:x}} b": "a b",
    "{{formatnum:3": "formatnum:3",
    "<nowiki>{{lc:[[A]]}}</nowiki> {{lc:[[A]]": "{{lc:[[A]]}} lc:A",
}


@pytest.mark.parametrize("source", WORDS)
def test_the_words_of_templates(source):
    assert plain_text(source, title="Title") == WORDS[source]


PERSIAN = "\u06f1\u066c\u06f2\u06f3\u06f4 \u06f1\u066c\u06f2\u06f3\u06f4\u066c\u06f5\u06f6\u06f7\u066b\u06f5"


@pytest.mark.parametrize(
    "language, shown",
    [
        ("en", "1,234 1,234,567.5 pages"),
        ("de", "1.234 1.234.567,5 pages"),
        ("fr", "1 234 1 234 567,5 pages"),
        ("es", "1234 1.234.567,5 pages"),
        ("ru", "1 234 1 234 567,5 page"),
        ("hi", "1,234 12,34,567.5 pages"),
        ("fa", f"{PERSIAN} pages"),
    ],
)
def test_numbers_of_languages(language, shown):
    """As the wikis show them; 21 things are in Russian's form for one."""
    site = WikiSite(language=language)
    source = "{{formatnum:1234}} {{formatnum:1234567.5}} {{plural:21|page|pages|pages}}"
    assert plain_text(source, site) == shown
    assert plain_text("{{formatnum:{{formatnum:1234567.5}}|R}}", site) == "1234567.5"


@pytest.mark.parametrize(
    "language, forms",  # numbers of each form, as CLDR lists them
    [
        ("en", "1; 0 2 17"),
        ("fr", "0 1; 2 17 100"),
        ("ru", "1 21 101; 2 3 4 22 102; 0 5 11 12 111"),
        ("pl", "1; 2 3 4 22 102; 0 5 12 21 112"),
        ("cs", "1; 2 3 4; 0 5 22"),
    ],
)
def test_plurals_of_languages(language, forms):
    for form, numbers in enumerate(forms.split(";")):
        for number in numbers.split():
            source = "{{plural:" + number + "|0th|1st|2nd}}"
            assert plain_text(source, WikiSite(language=language)) == ("0th", "1st", "2nd")[form], number


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
