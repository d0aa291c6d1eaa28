"""Names, digests and texts that must not pass, and those at the limit that must. Shared by every table."""

from __future__ import annotations

# Not adapter ids, wherever an id or a resource name is taken.
BAD_IDS = [
    *("", ".", "..", "../up", "a/b", "/absolute", ".hidden", "-dash", "_under", "a..b", "a/../b", "a//b", "a/"),
    *("UPPER", "Mixed", "a b", " a", "a ", "a\tb", "a\nb", "a\r\nb", "a\0b", "\0", "a\x1bb", "a\x7fb"),
    *("a\\b", "a:b", "a*b", "a?b", "a%2fb", "a%00", "a;b", "a|b", "$(a)", "{a}", "<a>", "a'b", 'a"b', "a`b", "a,b"),
    *("é", "a\u0301", "\uff41", "a\u202eb", "a\u200bb", "\ufeffa", "a\u00a0b", "ſ", "ß", "İ", "١", "²", "a\u2024b"),
    *("\U0001f642", "a\U000e0061b", "x" * 64, "x" * 255, "x" * 100_000, "é" * 40, "%s%n", "a\ud7ff", "a\uffff"),
]
GOOD_IDS = ["a", "0", "a.b", "a-b", "a_b", "a.", "a-", "0" * 63, "x" * 62, "con", "null", "base", "adapters"]

# Not resource names, beside "adapters/" and a bad id.
BAD_RESOURCES = [
    "",
    "x",
    "adapters",
    "Adapters/x",
    "/adapters/x",
    "adapter/x",
    "adapters:x",
    "operations/x",
    " adapters/x",
]

BAD_DIGESTS = [
    *(
        "zz",
        "0",
        "0" * 63,
        "0" * 65,
        "A" * 64,
        "g" * 64,
        "0" * 63 + "\n",
        "\uff10" * 64,
        "0x" + "0" * 62,
        " " + "0" * 63,
    ),
    *("0" * 100_000, "\0" * 64, "sha256:" + "0" * 57),
]

BAD_REQUEST_IDS = ["r" * 129, "r" * 100_000, "a\nb", "a\0b", "\x7f", "é", "\U0001f642", "a\u202eb", "\t", "\r\n"]
GOOD_REQUEST_IDS = ["r" * 128, "r" * 127, "~ !\"#$%&'()*+,-./:;<=>?@[]^_`{|}", " "]

BAD_LABEL_KEYS = ["", "A", "1", "-a", "_a", "a.b", "a b", "a\n", "a\0", "é", "a\u0301", "a" * 64, "a" * 10_000, "a/b"]
GOOD_LABEL_KEYS = ["a", "a" * 63, "a" * 62, "a-b_c9"]
MAX_TEXT_BYTES = 256  # of a display name and of a label's value
MAX_LABELS = 64

BAD_TENANTS = ["", "UPPER", "a b", "x" * 64, "x" * 1000, "a/b", "a:b", "a@b", "%41", "*", "a,b", "a;b", "$", "~"]
BAD_OWNERS = [*BAD_TENANTS[1:], "é", "a\n", "a\0", "x" * 100_000]  # an empty one stands for no tenant
# Lists of tenants, with the part of the path that leads to what is wrong.
BAD_TENANT_LISTS: list[tuple[list[str], str]] = [
    *(([tenant], "[0]") for tenant in [*BAD_TENANTS, "é", "a\n"]),
    (["a", "UPPER"], "[1]"),
    (["a", "b", "a"], ""),
    ([f"t{number}" for number in range(257)], ""),
    (["x"] * 100_000, ""),
]
GOOD_TENANTS = ["a", "x" * 63, "0", ".", "a.b-c_d", "default"]

BAD_PAGE_TOKENS = ["?", "UPPER", "a\0b", "../up", "x" * 512, "x" * 513, "x" * 100_000, "é", "a\nb", "-1"]
BAD_PAGE_SIZES = [1001, 1002, 2**31 - 1, 2**31, 2**32 - 1]
GOOD_PAGE_SIZES = [0, 1, 999, 1000]

BAD_OPERATIONS = [
    *(
        "",
        "operations",
        "operations/",
        "operations/x",
        "adapters/x",
        "operations/" + "0" * 31,
        "operations/" + "0" * 33,
    ),
    *("operations/" + "A" * 32, "operations/" + "0" * 31 + "\n", "operations/../" + "0" * 29, "\0", "o" * 100_000),
]
UNKNOWN_OPERATION = "operations/" + "0" * 32
UNKNOWN_DIGEST = "0" * 64
