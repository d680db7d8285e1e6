# ruff: noqa: E501  (the templates are prose: one wording a line)
"""Own texts: short stories in plain English, from plots whose sentences and words vary."""

import random

from grammar import expand

PEOPLE = (
    ("Anna", "she", "her", "girl"), ("Tom", "he", "his", "boy"), ("Mia", "she", "her", "girl"), ("Ben", "he", "his", "boy"),
    ("Lily", "she", "her", "girl"), ("Sam", "he", "his", "boy"), ("Nora", "she", "her", "girl"), ("Max", "he", "his", "boy"),
    ("Ella", "she", "her", "girl"), ("Jack", "he", "his", "boy"), ("Rosa", "she", "her", "girl"), ("Leo", "he", "his", "boy"),
    ("Clara", "she", "her", "girl"), ("Peter", "he", "his", "boy"), ("Ida", "she", "her", "girl"), ("Oscar", "he", "his", "boy"),
)  # fmt: skip
ANIMALS = "fox dog cat rabbit bird mouse bear owl duck frog horse goat hedgehog squirrel donkey crow".split()
THINGS = (
    "red kite", "silver key", "old map", "wooden boat", "warm coat", "music box", "bright lamp", "blue ball", "bag of seeds",
    "small clock", "golden button", "picture book", "green scarf", "little drum", "glass bottle", "paper crown",
)  # fmt: skip
PLACES = (
    "in a small village near the sea", "in a quiet town in the hills", "in a house at the edge of the forest",
    "on a farm beside a river", "in a city with many bridges", "in a cottage under a tall oak tree",
    "on a little island with a lighthouse", "in an old mill",
)  # fmt: skip
HIDING = (
    "under a stone", "behind the old mill", "in the tall grass", "near the well", "at the top of the hill", "in a dark cave",
    "on the bank of the river", "inside a hollow tree", "under the bridge", "behind the garden wall",
)  # fmt: skip
WORK = (
    "fisherman",
    "baker",
    "miller",
    "gardener",
    "clockmaker",
    "shepherd",
    "carpenter",
    "ferryman",
    "teacher",
    "tailor",
)

OPENING = (
    "once upon a time there was a $adj $child named $n. {$p lived $place.|$n lived $place.}",
    "$n lived $place. {$p was a $adj $child and liked to walk alone.|everyone knew $n as a $adj $child.}",
    "there was once a $adj $child called $n who lived $place{.| with $his grandmother.| with $his father.}",
    "$place there lived a $adj $child. {the name of the $child was $n.|everyone called the $child $n.}",
)
WEATHER = (
    "it was a {sunny|clear|warm} morning", "it was a cold {winter day|evening}", "the rain had {stopped at last|just stopped}",
    "a soft wind blew {from the sea|over the fields}", "it was late in the {evening|afternoon}", "snow lay on the roofs",
    "the first flowers were out", "the sun was {high|low} in the sky", "{fog|mist} hung over the {river|fields}",
)  # fmt: skip
ENDING = (
    "from that day on $n and the $a were {good|the best of} friends.",
    "$n {learned|understood} that a friend is worth more than any $t.",
    "and $n never forgot that {a little help can go a long way|it is good to be kind}.",
    "that night $n {slept well|fell asleep with a smile}.",
    "{when $p was old|many years later}, $n still {told this story|liked to tell this story}.",
    "after that $p was never {lonely|afraid} again.",
)

# a plot is a list of beats; a beat is a list of sentences that say the same step of the story
LOST = (
    ("one {day|morning} $n {lost|could not find} $his $t. $p looked {everywhere|in every room|in the house and in the garden}, "
     "but it was {gone|not there}.",
     "$weather. $n wanted to play with $his $t, but it was {gone|nowhere to be seen}.",
     "$n had a $t and {loved it|took it everywhere}. {but one day it was gone|one evening it was lost}."),
    ("on the way to {the river|the market|the wood} $p met a $a. \"why {are you sad|do you look so sad}?\" {asked the $a|the $a asked}.",
     "$p went out to {look for it|search}. near the road sat a $a. \"what are you looking for?\" {asked the $a|it asked}.",
     "then $p heard a {small|soft} voice. it was a $a. \"{can I|may I} help you?\" {it said|said the $a}."),
    ("\"I have lost my $t,\" said $n. \"{I saw it|I think I saw it} $hide,\" said the $a. \"come with me.\"",
     "\"my $t is gone,\" said $n. the $a {thought for a while|scratched its head}. \"{let us look|we should look} $hide,\" it said.",
     "$n told the $a about the $t. \"{I know|I think I know} where it is,\" said the $a. \"{look|it lies} $hide.\""),
    ("they walked {for a long time|a long way} {and crossed the old bridge|through the wet grass|over the hill}.",
     "they {asked a $b|met a $b}, and the $b showed them {the way|a path through the trees}.",
     "it began to rain, so they {waited under a tree|ran} and {told each other stories|laughed}."),
    ("$hide they found the $t. it was {wet|dirty|cold}, but {it was not broken|nothing was missing}.",
     "and there it was: the $t lay $hide. $n {jumped for joy|was so happy that $p laughed}."),
    ("\"thank you,\" said $n {to the $a|and gave the $a some bread}.",
     "$n thanked the $a {with all $his heart|again and again} and {shared $his bread with it|took it home}."),
)  # fmt: skip
HELP = (
    ("$weather, and $n went {out to play|down to the river|to fetch water}.", "one {day|evening} $n was {walking home|on $his way home}."),
    ("{there|near the old wall|beside the path} $p {found|saw} a $a that {could not walk|had hurt its foot|was shaking with cold}.",
     "{suddenly|then} $p heard a {cry|noise}. a $a was {caught in a fence|sitting in a deep hole|lost in the rain}."),
    ("\"do not be afraid,\" said $n {softly|quietly}. {$p took it in $his arms.|$p carried it home.}",
     "$n {was not afraid|did not wait}. $p {took off $his coat|ran for a rope} and {helped the $a|pulled the $a out}."),
    ("at home $p gave it {warm milk|bread and water|a bed of straw} {and sat beside it all night|by the fire}.",
     "$his mother {made some soup|found an old basket}, and the $a {slept by the fire|slept until the morning}."),
    ("after {three days|a week} the $a {was well again|could walk again}. {it ran back to the wood|it looked at $n and went away}.",
     "{soon|in the spring} the $a was {strong|well} again, but it {did not want to leave|came to the door every day}."),
    ("{weeks later|one winter day} $n lost {$his way|the path} in the {snow|wood|fog}. {who came out of the trees? it was the $a.|then the $a came out of the trees.}",
     "in the autumn $n fell into the {river|water}. the $a {saw it|heard $his cry} and {ran to fetch help|called the neighbours}."),
    ("the $a {showed $n the way home|led $n to the village}, and {both were glad|$his mother cried with joy}.",
     "so the $a {paid back|returned} what $n had done{| for it}."),
)  # fmt: skip
MAKE = (
    ("$n wanted {to build|to make} {a bridge over the stream|a house in a tree|a cart with four wheels|a boat}, but $p {did not know how|had no tools}.",
     "$n had a {plan|dream}: $p wanted to {build a boat|make a kite as big as a door|build a little house}."),
    ("\"that is too {hard|difficult} for you,\" said {the neighbours|$his brother|the other children}.",
     "{everybody|the other children} laughed. \"you will never {do it|finish it},\" they said."),
    ("{but $n|still, $n} {asked|went to} the old $work. \"{show me how|please teach me},\" said $n.",
     "only the old $work did not laugh. \"{I will show you|come tomorrow},\" {he said|said the $work}."),
    ("{the first day|at first} {everything went wrong|nothing would fit}. {the second day|the next day} was {better|a little better}.",
     "the $work showed $n how to {cut the wood|hold the hammer|tie a good knot}. {it took a long time|it was slow work}."),
    ("{a $a came every day and watched|every day a $a sat on the fence and watched}{.| the work.}",
     "$n worked {every evening|all summer} and {did not give up|never complained}."),
    ("{at last|in the autumn} {it was ready|the work was done}. {all the people|the whole village} came to {see it|look}.",
     "{one morning|then} {it was finished|the work was finished}, and {nobody laughed any more|even $his brother was proud}."),
    ("\"{how did you do it|how did you learn that}?\" {they asked|asked the children}. \"{step by step|a little every day},\" said $n.",
     "\"well done,\" said the $work. $n {smiled|was very proud}."),
)  # fmt: skip
OLD = (
    ("an old $work lived $place. {he was poor but content|every day he did his work|he had no family}.",
     "there was once an old $work who {had seen many countries|never spoke much|lived alone} $place."),
    ("{every|each} morning he {got up before the sun|opened his door|drank his tea} and {looked at the sky|went to work|fed his $a}.",
     "his only {friend|company} was a $a, {which slept at his feet|which followed him everywhere}."),
    ("one {evening|night} a {storm|stranger} came. {the wind shook the house|there was a knock at the door}.",
     "$weather when a {young man|child named $n} came to his door. \"{may I come in|can I stay here}?\" {was the question|said the voice}."),
    ("the old man {made a fire|put water on the fire} and {shared his bread|gave the guest his bed}.",
     "\"come in,\" said the old man. \"{there is soup for two|the fire is warm}.\""),
    ("{they talked|the two talked} {until late in the night|about far countries|about the sea}.",
     "the guest {told him|spoke} of {cities and ships|a $t that was lost long ago}, and the old man listened."),
    ("in the morning the guest was gone. on the table lay {a $t|a small bag and a letter}.",
     "when the sun rose, the guest {thanked him and went|left} and {gave him a $t|left a $t on the table}."),
    ("the old man {kept it all his life|smiled and put it on the shelf}. {he was never lonely again|it brought him luck}.",
     "{people say|it is said} that from then on {the house was never cold|the $work was never poor}."),
)  # fmt: skip
DAY = (
    ("$weather. $n {got up early|woke up} and {washed $his face|looked out of the window}.", "today $n {had no school|was on holiday}."),
    ("$p ate {bread and honey|an egg and some bread|a bowl of porridge} and drank {milk|tea} with $his {mother|father|grandmother}.",
     "{after breakfast|then} $p {helped in the kitchen|fed the $a|carried the water}."),
    ("then $p went to {the market|the lake|the wood|the library} with $his {friend $m|sister|brother|$a}.",
     "$his friend $m {came|was waiting} at the door. \"{shall we go to the lake|let us go to the market},\" said $m."),
    ("there they {bought apples|saw boats with white sails|read books about animals|picked berries}.",
     "they {played|sat in the sun|walked along the water} until {noon|they were hungry}."),
    ("{in the afternoon|later} {it rained a little|the wind grew strong|dark clouds came}, so they {went home|ran home|sat under a roof}.",
     "{on the way home|later} they {found a $t|met a $b} and {laughed a lot|talked about it for a long time}."),
    ("in the evening $n {wrote it all down|told $his father everything|drew a picture of it}.",
     "{at night|in bed} $n {thought of the day|listened to the wind} and {fell asleep|smiled}."),
)  # fmt: skip
TEST = (
    ("{a king|the mayor} wanted to {find|know} the {wisest|kindest} {person|child} in {the country|the town}.",
     "in the {town|village} there was a {contest|prize}: the $t {for the best answer|for the cleverest child}."),
    ("\"what is {stronger than iron|lighter than a feather|worth more than gold}?\" {was the question|he asked}.",
     "everyone had to {answer one question|bring the most {beautiful|useful} thing}."),
    ("{the rich merchant|one man} {spoke of gold|brought a crown}. {a soldier|another} {spoke of his sword|brought a sword}.",
     "many {came|tried}, and all of them {were wrong|spoke for a long time}."),
    ("then came $n, a $adj $child {from far away|in an old coat}. {some people laughed.|nobody knew $n.}",
     "at the end $n {stepped forward|came}, with $his $a. {people smiled.|it was very quiet.}"),
    ("\"{a kind word|friendship|a good friend},\" said $n. {everyone was silent.|\"it costs nothing and helps everyone.\"}",
     "$n {said|answered}: \"{bread when you are hungry|the help of a friend|a warm word}.\""),
    ("{the king|the old judge} {nodded|smiled}. \"{that is the right answer|well said},\" he said{.| and gave $n the $t.}",
     "\"{nobody has said it better|you are right},\" {said the king|he said}, and $n {won|got} the $t."),
)  # fmt: skip
PLOTS = {"lost": LOST, "help": HELP, "make": MAKE, "old": OLD, "day": DAY, "test": TEST}
QUESTIONS = (
    "tell me a {short |}story about a $a.", "tell me a story about $n{.| and a $a.}", "write a {short |}story about a $t.",
    "{please |}tell me a {short |}story.", "can you tell me a {|short }story{| about a $child}?", "write a story for children.",
    "tell me a story about a $child and a $a.", "I {want|would like} to hear a story about a $a.",
)  # fmt: skip


def article(noun: str) -> str:
    """`an` before a vowel."""
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


def make_story(rng: random.Random) -> tuple[str, str]:
    """One question and the story that answers it. The same person, animal and thing run through the whole story."""
    name, he, his, child = rng.choice(PEOPLE)
    animal, other = rng.sample(ANIMALS, 2)
    words = {
        "n": name, "p": he, "his": his, "child": child, "a": animal, "b": other, "t": rng.choice(THINGS),
        "adj": rng.choice("kind brave curious shy clever cheerful patient careful quiet young little".split()),
        "place": rng.choice(PLACES), "hide": rng.choice(HIDING), "work": rng.choice(WORK),
        "m": rng.choice([person[0] for person in PEOPLE if person[0] != name]),
    }  # fmt: skip
    plot = rng.choice(list(PLOTS))
    beats = list(PLOTS[plot])
    # one inner beat may be left out, so that the length varies
    if len(beats) > 5 and rng.random() < 0.4:
        beats.pop(rng.randrange(2, len(beats) - 2))
    lines = [] if plot in ("old", "test") else [rng.choice(OPENING)]
    lines += [rng.choice(beat) for beat in beats]
    if rng.random() < 0.7 and plot not in ("old", "test", "day", "make"):
        lines.append(rng.choice(ENDING))
    story = " ".join(expand(line, rng, weather=rng.choice(WEATHER), **words) for line in lines)
    story = expand(story, rng, **words)
    for noun in (animal, other, words["t"], words["adj"]):
        story = story.replace(f" a {noun}", f" {article(noun)}").replace(f"A {noun}", article(noun).capitalize())
    question = expand(rng.choice(QUESTIONS), rng, **words)
    for noun in (animal, words["t"]):
        question = question.replace(f" a {noun}", f" {article(noun)}")
    if plot in ("old", "test"):
        question = expand(
            "{tell me a {short |}story.|write a story for children.|can you tell me a story?|tell me a tale.}", rng
        )
        if plot == "old" and rng.random() < 0.5:
            question = f"Tell me a story about an old {words['work']}."
    return question, story
