"""The words the zoo's tasks are written with; the zoo's tokenizer knows each of them as one token."""


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


SERVICES = _names(
    """
    orion vega altair rigel sirius deneb castor pollux mira spica antares capella bellatrix canopus procyon regulus
    atlas titan hydra lyra draco cygnus aquila corvus lynx pavo norma phoenix perseus pegasus columba carina
    dorado fornax gemini hermes iris juno kepler luna metis nova oberon pallas quasar rhea saturn triton
    """
)

HOSTS = _names(
    """
    oslo lima cairo paris tokyo delhi quito accra dakar hanoi minsk milan turin porto basel berne
    sofia riga tunis rabat lagos nairobi lusaka harare maputo luanda bogota caracas havana panama austin boston
    denver dallas seattle tampa toronto ottawa calgary vienna prague warsaw zagreb athens ankara izmir beirut amman
    muscat doha kabul lahore mumbai chennai dhaka jakarta manila osaka kyoto seoul busan perth sydney hobart
    """
)

VARIABLES = _names(
    """
    amber birch cedar ember fern grove hazel ivy jasmine kelp lotus maple nettle olive poppy quince
    reed sage thyme umber violet willow yarrow zinnia acorn basil clover daisy elder flax ginger heath
    indigo juniper laurel moss nutmeg orchid pine rose sorrel tulip vine wheat aster bracken cress dahlia
    fennel garlic holly iron jade copper cobalt coral pearl ruby topaz opal onyx quartz slate marble
    """
)

USERS = _names(
    """
    maria ahmed chen priya ivan sofie kofi yuki lucas emma noah lena omar anna hugo nina
    """
)

FUNCTIONS = ("print", "trace", "flush", "append", "notify", "record", "measure", "verify")

NUMBERS = tuple(str(number) for number in range(10, 100))
"""Values: two digits, one token."""

TWO_DIGITS = tuple(f"{number:02d}" for number in range(100))
"""Clock times, counters and values."""
