# SPDX-License-Identifier: Apache-2.0
"""The words for which a template or a magic word of MediaWiki stands in a sentence.

    >>> TEMPLATES["val"](Arguments({"1": "1.5", "u": "kg"}), "en"), magic_word("formatnum", ["3003"], "de")
    ('1.5 kg', '3.003')

Templates are programs of a wiki, which a dump has in other pages; those of TEMPLATES are common, and written anew here.
Magic words are MediaWiki's own and the same in every language (https://www.mediawiki.org/wiki/Help:Magic_words). What
depends on the day (`{{CURRENTYEAR}}`, `{{age}}`), on other pages or on programs (`{{#invoke:}}`, `{{#expr:}}`) is left out.
"""

import re
from collections.abc import Callable, Iterator
from pathlib import Path


def _words() -> dict[str, tuple[str, ...]]:
    sections: dict[str, list[str]] = {}
    for line in Path(__file__).with_name("wikitext_words.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            sections[line.strip("[]")] = []
        elif line and line[0] != "#":
            sections[list(sections)[-1]].append(line)
    return {name: tuple(words) for name, words in sections.items()}


WORDS = _words()


class Arguments(dict[str, str]):
    """The texts of a template's arguments by name: "1", "2" ... or "text". Missing ones are empty."""

    def __missing__(self, name: str) -> str:
        return ""

    @property
    def words(self) -> list[str]:
        """Those that are numbered, in order, to the last one that has a text."""
        last = max((int(name) for name, text in self.items() if name.isdecimal() and len(name) < 4 and text), default=0)
        return [self[str(number)] for number in range(1, last + 1)]

    def any(self, *names: str) -> str:
        """The first of these that is not empty."""
        return next((self[name] for name in names if self[name]), "")


# ---- magic words -------------------------------------------------------------------------------------------------------


def magic_word(name: str, arguments: list[str], language: str) -> str:
    """The words of `{{name:argument|argument}}`, given the name in lower case; none if it is not known.

    >>> [magic_word(*call, "en") for call in (("uc", ["ab"]), ("padleft", ["7", "3"]), ("plural", ["2", "is", "are"]))]
    ['AB', '007', 'are']
    """
    function = MAGIC.get(_IN_ENGLISH.get(name, name))
    return function([argument.strip() for argument in arguments], language) if function else ""


def _at(words: list[str], number: int) -> str:
    return words[number] if len(words) > number else ""


# (between groups of digits, before decimals) of languages; MediaWiki's default is 1,234.5
_SEPARATORS = {
    **dict.fromkeys("az bs ca da de el es eu fo gl hr id is it lb mk nl pt ro sl sr tr vi".split(), (".", ",")),
    **dict.fromkeys("be bg cs eo et fi fr hu hy ka kk ky lt lv nb nn no oc pl ru".split(), ("\u00a0", ",")),
    **dict.fromkeys("sk sq sv tt uk uz".split(), ("\u00a0", ",")),
    **dict.fromkeys(("fa", "ps", "ckb"), ("\u066c", "\u066b")),
}
_LATE_GROUPS = frozenset("be bg es et hy ka lv pl pt".split())  # 1234, but 12.345
_PAIRS = frozenset("as bn gu hi kn ml mr ne or pa sa ta te".split())  # 12,34,567
_ZERO = {"fa": 0x6F0, "ps": 0x6F0, "ckb": 0x660, "bn": 0x9E6, "as": 0x9E6, "mr": 0x966, "ne": 0x966, "my": 0x1040}
_NUMBER = re.compile(r"(-?)(?<![\d.])(\d+)(\.\d+)?")


def format_number(text: str, language: str, groups: bool = True) -> str:
    """The numbers of a text as MediaWiki's formatnum writes them in a language; all other characters stay.

    >>> format_number("-1234567.89", "en"), format_number("1234567.89", "de"), format_number("1234567", "hi")
    ('\u22121,234,567.89', '1.234.567,89', '12,34,567')
    """
    between, point = _SEPARATORS.get(language, (",", "."))

    def one(match: re.Match) -> str:
        sign, whole, decimals = match.groups()
        if groups and len(whole) > (4 if language in _LATE_GROUPS else 3):
            whole = re.sub(
                r"(?<=\d)(?=(\d\d)*\d{3}$)" if language in _PAIRS else r"(?<=\d)(?=(\d{3})+$)", between, whole
            )
        number = whole + (point + decimals[1:] if decimals else "")
        zero = _ZERO.get(language)
        return ("\u2212" if sign else "") + (
            number.translate({48 + n: zero + n for n in range(10)}) if zero else number
        )

    return _NUMBER.sub(one, text)


def _formatnum(words: list[str], language: str) -> str:
    """`{{formatnum:1234}}`, with `|NOSEP` without groups, with `|R` back to a plain number."""
    how = _at(words, 1).upper()
    if how == "R":
        between, point = _SEPARATORS.get(language, (",", "."))
        plain = re.sub(r"\d", lambda digit: str(int(digit[0])), words[0]).replace("\u2212", "-")
        return plain.replace(between, "").replace(point, ".")
    return format_number(_at(words, 0), language, groups=how != "NOSEP")


def _padded(words: list[str]) -> tuple[str, str]:
    """(text, filling) of `{{padleft:text|width|filling}}`."""
    width, fill = _at(words, 1), _at(words, 2) or "0"
    missing = min(int(width), 500) - len(words[0]) if width.isdecimal() else 0
    return words[0], (fill * max(missing, 0))[: max(missing, 0)]


def _plural(words: list[str], language: str) -> str:
    """`{{plural:2|page|pages}}`; forms for a certain number are `0=none`."""
    number = re.sub(r"\D", "", _at(words, 0).partition(".")[0]) or "0"
    exact = dict(form.split("=", 1) for form in words[1:] if re.match(r"\d+=", form))
    forms = [form for form in words[1:] if not re.match(r"\d+=", form)]
    if number in exact or not forms:
        return exact.get(number, "")
    return forms[min(_plural_form(int(number), language), len(forms) - 1)]


def _plural_form(n: int, language: str) -> int:
    """The number of the form for n things: CLDR's rules of Slavic and Romance languages, else 0 for one alone."""
    few = 2 <= n % 10 <= 4 and not 12 <= n % 100 <= 14
    if language in ("be", "bs", "hr", "ru", "sr", "uk"):
        return 0 if n % 10 == 1 and n % 100 != 11 else 1 if few else 2
    if language == "pl":
        return 0 if n == 1 else 1 if few else 2
    if language in ("cs", "sk"):
        return 0 if n == 1 else 1 if 2 <= n <= 4 else 2
    return int(n > 1) if language in ("fr", "pt", "hy", "hi", "fa") else int(n != 1)


def _switch(words: list[str]) -> str:
    """`{{#switch: b | a = 1 | b | c = 2 | otherwise}}` -> "2"."""
    found, default = False, ""
    for number, case in enumerate(words[1:], 1):
        key, equals, value = (part.strip() for part in case.partition("="))
        found = found or key == words[0]
        if equals and found:
            return value
        if equals and key == "#default" or not equals and number == len(words) - 1:
            default = value if equals else key
    return default


MAGIC: dict[str, Callable[[list[str], str], str]] = {
    "formatnum": _formatnum,
    "lc": lambda words, language: words[0].lower(),
    "uc": lambda words, language: words[0].upper(),
    "lcfirst": lambda words, language: words[0][:1].lower() + words[0][1:],
    "ucfirst": lambda words, language: words[0][:1].upper() + words[0][1:],
    "padleft": lambda words, language: "".join(reversed(_padded(words))),
    "padright": lambda words, language: "".join(_padded(words)),
    "plural": _plural,
    "grammar": lambda words, language: _at(words, 1),
    "#dateformat": lambda words, language: words[0],
    "#formatdate": lambda words, language: words[0],
    "#if": lambda words, language: _at(words, 1 if words[0] else 2),
    "#ifeq": lambda words, language: _at(words, 2 if words[0] == _at(words, 1) else 3),
    "#switch": lambda words, language: _switch(words),
}
_IN_ENGLISH = {word: name for name in ("formatnum", "lc", "uc", "plural") for word in WORDS[f"magic word {name}"]}
MAGIC_WORDS = (*MAGIC, *_IN_ENGLISH)
TITLES = frozenset("pagename fullpagename basepagename subpagename rootpagename".split())  # of an article: its title


# ---- numbers -----------------------------------------------------------------------------------------------------------


def _raised(unit: str) -> str:
    """`m/s2` -> the same with a raised 2."""
    return re.sub(r"(?<=[a-z])[23](?!\w)", lambda digit: {"2": "\u00b2", "3": "\u00b3"}[digit[0]], unit)


_JOINTS = dict(zip("to and or by x xx * - to(-) and(-) or(-) +/-".split(), "to and or by x x x - - and or +-".split()))
_JOINTS |= {"\u2013": "\u2013", "\u00d7": "x", "\u00b1": "+-"}
_WRITTEN = {"x": " \u00d7 ", "-": "\u2013", "\u2013": "\u2013", "+-": " \u00b1 "}
_UNITS = {"C": "\u00b0C", "F": "\u00b0F", "kph": "km/h"} | {
    f"{power}{unit}": f"{power} {unit}" for power in ("sq", "cu") for unit in ("mi", "ft", "in", "yd")
}


def _measure(a: Arguments, language: str) -> str:
    """`{{convert|5|to|10|km|mi}}` -> "5 to 10 km", `{{convert|5|ft|2|in}}` -> "5 ft 2 in"."""
    words = a.words or [""]
    text, at = words[0], 1
    while len(words) > at + 1 and words[at].lower() in _JOINTS:
        joint = _JOINTS[words[at].lower()]
        text, at = f"{text}{_WRITTEN.get(joint, f' {joint} ')}{words[at + 1]}", at + 2
    while len(words) > at:
        text, at = f"{text} {_raised(_UNITS.get(words[at], words[at]))}", at + 1
        if len(words) <= at + 1 or not re.fullmatch(r"[\d.,]+", words[at]) or re.fullmatch(r"[\d.,]+", words[at + 1]):
            break  # what follows is the unit of the other measure, or the number of its digits
        text, at = f"{text} {words[at]}", at + 1
    return text


def _value(a: Arguments, language: str) -> str:
    """`{{val|1.2|0.1|e=3|u=m|up=s}}` -> "(1.2 +- 0.1) x 10^3 m/s"."""
    number = format_number(a["1"], language) if a["fmt"] == "commas" else a["1"]
    if a["2"] and a["3"]:
        number += f" +{a['2'].lstrip('+')} \u2212" + a["3"].lstrip("-\u2212")
    elif a["2"]:
        number = f"{number} \u00b1 {a['2']}"
    unit, per = _raised(a.any("u", "ul")), _raised(a.any("up", "upl"))
    if a["2"] and (a["e"] or unit):
        number = f"({number})"
    number += _power_of_ten(a["e"]) + a.any("end", "s")
    unit += f"/{per}" if per else ""
    return a["p"] + number + (unit if unit[:1] in ("", "%", "\u00b0") else f" {unit}")


def _power_of_ten(exponent: str) -> str:
    return f" \u00d7 10^{exponent}" if exponent else ""


def _fraction(a: Arguments, language: str) -> str:
    """`{{frac|1|2}}` -> "1/2", `{{frac|3|1|2}}` -> "3 1/2"."""
    words = a.words
    *whole, top, bottom = words if len(words) > 1 else ["", *words] if words else ["", ""]
    return " ".join([*whole, f"{top}/{bottom}".strip("/")])


def _height(a: Arguments, language: str) -> str:
    """`{{height|ft=5|in=6}}` -> "5 ft 6 in", `{{height|m=1.75}}` -> "1.75 m"."""
    return " ".join(f"{a[unit]} {unit}" for unit in ("m", "cm", "ft", "in") if a[unit])


def _before(mark: str) -> Callable[[Arguments, str], str]:
    """A mark, and the number that follows it, if there is one."""
    return lambda a, language: mark + a["1"]


def _ordinal(a: Arguments, language: str) -> str:
    number = a["1"]
    teen = number[-2:] in ("11", "12", "13")
    return number + ("th" if teen else dict(zip("123", ("st", "nd", "rd"))).get(number[-1:], "th")) if number else ""


def _coordinates(a: Arguments, language: str) -> str:
    """`{{coord|13|19|N|169|9|W}}` and `{{coord|13.3|-169.1}}`; empty where they stand beside the title alone."""
    if a["display"] and not {"inline", "i"} & set(re.split(r"[\s,]+", a["display"])) and a["display"] != "it":
        return ""
    places, numbers = [], []
    for word in a.words:
        if word.upper() in ("N", "S", "E", "W") and numbers:
            marks = zip(numbers, "\u00b0\u2032\u2033")
            places.append("".join(map("".join, marks)) + word.upper())
            numbers = []
        elif re.fullmatch(r"-?[\d.]+", word):
            numbers.append(word)
        else:
            break
    if not places and len(numbers) > 1:
        for number, (positive, negative) in zip(numbers, ("NS", "EW")):
            places.append(f"{number.lstrip('-')}\u00b0{negative if number.startswith('-') else positive}")
    return " ".join(places)


# ---- dates -------------------------------------------------------------------------------------------------------------

_MONTHS = "January February March April May June July August September October November December".split()


def _date(words: list[str]) -> str:
    """Year, month and day, the last two optional: 2001, 5, 3 -> "3 May 2001"."""
    year, month, day = (*words[:3], "", "", "")[:3]
    name = _MONTHS[int(month) - 1] if month.isdecimal() and 1 <= int(month) <= 12 else month
    return " ".join(filter(None, (day, name, year)))


def _as_of(a: Arguments, language: str) -> str:
    """`{{as of|2001|5}}` -> "As of May 2001"."""
    beginning = "Since" if a["since"] else "As of"
    return a["alt"] or f"{beginning.lower() if a['lc'] else beginning} {_date(a.words)}".strip()


def _years(before: str) -> Callable[[Arguments, str], str]:
    """`{{reign|1500|1520}}` -> "r. 1500-1520", with a dash."""
    return lambda a, language: " ".join(filter(None, (before, "\u2013".join(filter(None, a.words[:2])))))


# ---- words -------------------------------------------------------------------------------------------------------------


def _first(a: Arguments, language: str) -> str:
    return a.any("1", "text")


def _second(a: Arguments, language: str) -> str:
    return a.any("2", "text")


def _last(a: Arguments, language: str) -> str:
    return a.words[-1] if a.words else ""


def _translated(a: Arguments, language: str) -> str:
    """`{{nihongo|English|kanji|romaji}}` -> "English (kanji, romaji)"."""
    others = ", ".join(filter(None, (a["2"], a["3"])))
    return f"{a['1']} ({others})" if others and a["1"] else a["1"] or others


def _pronounced(a: Arguments, language: str) -> str:
    """`{{IPA|sound}}`, or since 2024 `{{IPA|fr|sound}}`."""
    return a["2"] if a["2"] and re.fullmatch(r"[a-z]{2,3}(-[A-Za-z]+)*", a["1"]) else a["1"]


def _authors(a: Arguments, language: str) -> str:
    """`{{harvtxt|Boolos|Jeffrey|1974}}` -> "Boolos & Jeffrey (1974)"."""
    *names, year = a.words or [""]
    return f"{' & '.join(filter(None, (', '.join(names[:-1]), *names[-1:])))} ({year})" if names else year


def _ship(prefix: str, name: str, number: str, form: str) -> str:
    """`{{USS|Hornet|CV-12}}` -> "USS Hornet (CV-12)"; forms leave out the prefix (2, 3) or the number (2, 5, 6)."""
    words = [name] if form in ("2", "3") else [prefix, name]
    return " ".join([*words, *([f"({number})"] if number and form not in ("2", "5", "6") else [])])


def _ships() -> Iterator[tuple[str, Callable[[Arguments, str], str]]]:
    for prefix in WORDS["prefixes of ships"]:
        yield prefix.lower(), lambda a, language, prefix=prefix: _ship(prefix, a["1"], a["2"], a["3"])
    yield "ship", lambda a, language: _ship(a["1"], a["2"], a["3"], a["4"]).strip()


def _class_of_ships(a: Arguments, language: str) -> str:
    """`{{sclass|Nimitz|aircraft carrier}}` -> "Nimitz-class aircraft carrier"."""
    return f"{a['1']}-class {a['2']}".strip()


_NOTES = dict(flat="\u266d", sharp="\u266f", natural="\u266e")
_SYMBOLS = {
    **dict.fromkeys(("snd", "spnd", "spaced ndash"), " \u2013 "),
    **dict.fromkeys(("nbsp", "spaces", "thinsp", "hair space", "hairsp", "space"), " "),
    **dict.fromkeys(("mdash", "mdashb"), "\u2014"),
    **dict.fromkeys(("dot", "middot", "\u00b7"), " \u00b7 "),
    **dict.fromkeys(("bull", "bullet"), " \u2022 "),
    **dict.fromkeys(("br", "break"), "\n"),
    "'": "'",
    "'s": "'s",
    "' \"": "'\"",
    "\" '": "\"'",
    '-"': '"',
    "ndash": "\u2013",
    "=": "=",
    "!": "|",
    "times": "\u00d7",
    "minus": "\u2212",
    "pi": "\u03c0",
    "eqm": "\u21cc",
}

_KINDS: dict[str, Callable[[Arguments, str], str]] = {  # names of several templates, in wikitext_words.txt
    "first word": _first,
    "second word": _second,
    "last word": _last,
    "number and unit": lambda a, language: f"{format_number(a['1'], language)} {_raised(a['2'])}".strip(),
    "dates": lambda a, language: _date(a.words),
    "quotations": lambda a, language: a.any("text", "quote", "1"),
    "blocks": lambda a, language: _last(a, language) or a.any("content", "text"),
}
TEMPLATES: dict[str, Callable[[Arguments, str], str]] = {
    **{name: function for kind, function in _KINDS.items() for name in WORDS[kind]},
    **{name: lambda a, language, symbol=symbol: symbol for name, symbol in _SYMBOLS.items()},
    **{
        name: lambda a, language, symbol=symbol: symbol + a["1"] if a["1"] else ""
        for name, symbol in map(str.split, WORDS["currencies"])
    },
    **dict(_ships()),
    **dict.fromkeys(("convert", "cvt"), _measure),
    **dict.fromkeys(("nihongo", "nihongo2"), _translated),
    **dict.fromkeys(("frac", "fraction", "sfrac"), _fraction),
    **dict.fromkeys(("chem", "chem2", "linktext"), lambda a, language: "".join(a.words)),
    **dict.fromkeys(("circa", "c.", "ca."), _years("c.")),
    **dict.fromkeys(("floruit", "fl."), _years("fl.")),
    **dict.fromkeys(("reign", "r."), _years("r.")),
    **dict.fromkeys(("born", "b."), _years("b.")),
    **dict.fromkeys(("died", "d."), _years("d.")),
    **dict.fromkeys(("coord", "coordinates"), _coordinates),
    **dict.fromkeys(("harvtxt", "harvcoltxt"), _authors),
    **dict.fromkeys(("sclass", "sclass-", "sclass2"), _class_of_ships),
    "bibleref": lambda a, language: " ".join(a.words[:2]),
    "bibleverse": lambda a, language: " ".join(filter(None, a.words[:3])),
    **dict.fromkeys(("formatnum", "num", "fmtn", "nts"), lambda a, language: _formatnum(a.words[:2] or [""], language)),
    **dict.fromkeys(("ubl", "unbulleted list"), lambda a, language: "\n".join(a.words)),
    "val": _value,
    "e": lambda a, language: _power_of_ten(a["1"]),
    "10^": lambda a, language: f"10^{a['1']}",
    "x10^": lambda a, language: f"\u00d710^{a['1']}",
    "gaps": lambda a, language: a["lhs"] + " ".join(a.words) + _power_of_ten(a["e"]),
    "height": _height,
    **dict.fromkeys(("\u00b1", "+-", "plusminus"), _before("\u00b1")),
    **dict.fromkeys(("deg", "degree", "degrees"), lambda a, language: f"{a['1']}\u00b0{a['2']}"),
    **dict.fromkeys(("sqrt", "radic"), _before("\u221a")),
    "ordinal": _ordinal,
    "as of": _as_of,
    "oldstyledate": lambda a, language: f"{a['1']} [O.S. {a['3']}] {a['2']}".strip(),
    "ipa": _pronounced,
    "tsl": lambda a, language: a.any("4", "3"),
    "sic": lambda a, language: a["1"] or "[sic]",
    "hlist": lambda a, language: " \u00b7 ".join(a.words),
    "us patent": lambda a, language: f"U.S. Patent {a['1']}".strip(),
    "music": lambda a, language: _NOTES.get(a["1"], ""),
}
