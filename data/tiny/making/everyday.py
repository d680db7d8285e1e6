# ruff: noqa: E501  (the templates are prose: one wording a line)
"""Own texts: words of everyday life, small talk, and small problems that are thought through before the answer."""

import random
from collections.abc import Callable

from grammar import Topic, expand, parse_topics

WORDS = """
cat: A cat is a small {animal|pet} that {catches mice|likes warm places}. / Cats {purr|make a soft sound} when they are {happy|content}. / {Many people|People} keep cats in their houses.
dog: A dog is an animal that {lives with people|is a friend of people}. / Dogs {guard houses|bark at strangers} and {like to run|like to play}. / {Some dogs|Dogs can} help {hunters|shepherds|blind people}.
horse: A horse is a {large|strong} animal that {eats grass|people can ride}. / {In old times|Long ago} horses {pulled carts|carried people and goods}.
bird: A bird is an animal with {feathers and wings|feathers, wings and a beak}. / {Most birds|Nearly all birds} can fly. / Birds {build nests|lay eggs}{| in the spring}.
fish: A fish is an animal that {lives in water|swims in water}. / {It breathes|Fish breathe} with gills and {swims|swim} with fins.
bear: A bear is a {big|large}, strong animal {with thick fur|that lives in the forest}. / Bears {eat berries, fish and honey|like honey and fish}. / In winter {they sleep|many bears sleep} {for a long time|in a cave}.
whale: A whale is a {very large|huge} animal that lives in the sea. / {It is not a fish|A whale is no fish}: it breathes air and {feeds its young with milk|has warm blood}.
spider: A spider is a small animal with eight legs. / {Many spiders|Spiders} {spin|make} webs and {catch insects|eat insects}.
bee: A bee is a {small insect|flying insect} that {makes honey|visits flowers}. / Bees live together in {a hive|large groups}. / {They carry|Bees carry} pollen from flower to flower.
tree: A tree is a {tall|large} plant with a trunk, branches and leaves. / Trees {give shade|clean the air} and {give us wood and fruit|are homes for birds}. / {Some trees|A tree can} live for {hundreds of years|a very long time}.
flower: A flower is the {colourful|bright} part of a plant. / {From it|From the flower} {comes the seed|grow seeds or fruit}. / Bees {visit|like} flowers.
forest: A forest is a {large|wide} piece of land {covered with trees|where many trees grow}. / {Deer, foxes and birds|Many animals} live there.
river: A river is a {large|long} stream of water that {flows to the sea|flows into a lake or the sea}. / {Towns were often|Many towns were} built on rivers. / {Boats|Ships} travel on {large rivers|it}.
lake: A lake is a {large|wide} body of water with land all around it. / {People swim|You can swim} and fish there.
sea: The sea is the {salt water|great body of salt water} that covers {most of the earth|much of the earth}. / {Ships sail on it|Ships cross it} and {fish live in it|whales live in it}.
mountain: A mountain is {a very high hill|land that rises very high}. / {On high mountains|At the top} {there is snow|it is cold}{| all year}.
volcano: A volcano is a mountain {with an opening|that is open at the top}, from which {hot rock and ash|lava and ash} can come. / {When it erupts|In an eruption}, {lava flows down|hot lava runs down} its sides. / {Some volcanoes|Many volcanoes} {sleep for hundreds of years|have been quiet for a long time}.
desert: A desert is a {dry|very dry} land where {little rain falls|it hardly ever rains}. / {Few plants|Only a few plants} and animals live there.
island: An island is a piece of land with water {all around it|on every side}. / {You need|One needs} a boat or {a bridge|a plane} to {get there|reach it}.
rain: Rain is water that falls from the clouds in drops. / {Plants need|Fields need} rain to grow. / {After the rain|When the sun comes out} {you may see|there may be} a rainbow.
snow: Snow is {frozen water|water that freezes in the clouds} and falls in {white|soft} flakes. / {Children|People} {build snowmen|like to play in it}.
cloud: A cloud is {made of|a mass of} very small drops of water in the air. / {When the drops grow|When they get heavy}, it rains.
wind: Wind is air that moves. / It {turns mills|fills sails} and {brings rain|brings clouds}.
sun: The sun is {a star|the star} that gives us light and {heat|warmth}. / The earth {moves|goes} around it once a year. / {Without the sun|Without it} nothing could live.
moon: The moon {goes|moves} around the earth {once a month|in about a month}. / {It shines|It is bright} because it {reflects|throws back} the light of the sun.
star: A star is a {huge|great} ball of hot gas {that gives light|far away}. / Our sun is a star{| too}.
earth: The earth is the planet {on which|where} we live. / It {turns|spins} once a day and goes around the sun once a year.
winter: Winter is the coldest {season|time} of the year. / {It snows|There is snow}, and the days are short.
spring: Spring is the season {after winter|between winter and summer}. / {Flowers grow|The trees get leaves} and {the birds return|the days get longer}.
summer: Summer is the warmest {season|time} of the year. / {The days are long|People swim and rest}{|, and fruit grows}.
autumn: Autumn is the season {after summer|between summer and winter}. / The leaves {turn yellow|fall} and {the fruit is picked|birds fly south}.
house: A house is a building {where people live|in which people live}. / It has {walls, a roof, doors and windows|rooms, doors and windows}. / {It keeps us|A house keeps people} warm and dry.
bridge: A bridge is {built|made} to {cross|go over} {a river|a river or a road}. / {It can be made|Bridges are made} of wood, stone or steel.
road: A road is a {long|hard} way on which {cars and people|carts and cars} travel. / Roads {join|connect} towns and villages.
school: A school is a place where {children learn|children go to learn}. / {There they|They} learn to read, write and count. / {Teachers|The teachers} {help|teach} them.
library: A library is a place {with many books|where many books are kept}. / You can read {there|them there} or take {them|books} home for {some time|a while}.
hospital: A hospital is a {building|place} where {sick people|ill people} are {treated|helped}. / Doctors and nurses work there.
market: A market is a place where people buy and sell {things|food and other things}. / {You can find|There are} {fruit, bread and fish|vegetables and fruit} there.
city: A city is a {large|big} town {where many people live|with many people}. / It has {streets, shops and schools|many houses and streets}.
village: A village is a small place {in the country|with a few houses}. / {People there|The people} often {know each other|work on the fields}.
book: A book is {made of many pages|a set of pages} with {words or pictures|text}. / {We read books|People read books} to learn or {for fun|to rest}.
letter: A letter is a {written message|message on paper} that {is sent|you send} to somebody. / {It also means|The word also means} a sign of the alphabet, such as A or B.
clock: A clock shows the time. / {It has|A clock has} two hands, {one|a short one} for the hours and {one|a long one} for the minutes.
key: A key is a small piece of metal that opens {a lock|a door}. / {It also means|A key is also} {the thing|something} that {helps to solve|solves} a problem.
door: A door is {the way into|an opening into} a room or house that you can {open and close|close}.
window: A window is an opening in a wall, {usually with glass|with glass in it}. / It lets in light and air.
table: A table is a piece of furniture with a flat top and legs. / {We eat|People eat} and {work|write} at {a table|it}.
chair: A chair is a seat for one person, with {legs and a back|four legs and a back}.
bread: Bread is {food made of|made of} flour and water{| and baked in an oven}. / {People eat it|It is eaten} every day in many countries.
water: Water is a {clear liquid|liquid without colour or taste}. / {All life needs it|Nothing can live without water}. / When it is very cold, it {becomes|turns into} ice.
ice: Ice is frozen water. / {It is cold and hard|It melts} {and slippery|when it gets warm}.
fire: Fire is {the light and heat|heat and light} from something that burns. / {It keeps us warm|It warms us}, but it can {be dangerous|burn}.
milk: Milk is a white {drink|liquid} that comes from cows{| and other animals}. / {Butter and cheese|Cheese} are made from it.
apple: An apple is a round fruit that grows on trees. / It can be red, green or yellow. 
tea: Tea is a hot drink made from {dry leaves|the leaves of a plant}. / {Many people|People} drink it with {milk|sugar|lemon}.
ship: A ship is a {large|big} boat that {sails|travels} on the sea. / {It carries|Ships carry} people and goods. / {The captain|A captain} leads the {crew|sailors}.
train: A train is {a row of|made of several} cars that {runs|run} on rails. / {People|It is used by people who} travel {far|to other towns} by train. 
car: A car is a machine with four wheels and an engine. / {People drive|You can drive} it on roads.
plane: A plane is a machine with wings that {flies|can fly}. / {It takes|It carries} people {over the sea|to far countries} in a few hours.
doctor: A doctor {helps|treats} people who are ill. / {Doctors|They} work in {hospitals|a hospital}{| or in a practice}.
teacher: A teacher {helps others to learn|teaches children}. / {He or she|A good teacher} explains {things|hard things} {well|in simple words}.
farmer: A farmer {grows food|works on the land}. / {Farmers|Many farmers} {keep cows and sheep|grow corn and vegetables}.
king: A king is a man who rules {a country|a kingdom}. / {His wife is|His wife is called} the queen.
friend: A friend is somebody {whom you like|you can trust} and {who helps you|who likes you}. / {Friends talk|Good friends laugh} together.
music: Music is {made of|a pattern of} sounds that {people like to hear|are nice to hear}. / {It is made|You make it} with the voice or with instruments.
computer: A computer is a machine that {follows programs|works with data}. / It can {count|calculate}, {store texts and pictures|keep data} and {send messages|talk to other computers}.
language: A language is a {system|set} of words that people use to {speak and write|talk to each other}. / {English and Russian|Russian and English} are languages.
number: A number {tells|says} how many things there are. / {You can|We} add {numbers|two numbers} and {multiply them|take one from another}.
year: A year is the time in which the earth goes once around the sun. / It has twelve months, or 365 days.
week: A week {has|is made of} seven days. / It {begins|starts} with Monday and ends with Sunday.
hour: An hour {has|is} sixty minutes. / A day has {twenty-four|24} hours.
war: War is {fighting|a long fight} between countries or {groups|peoples}. / {It brings|War brings} {death and hunger|great suffering}.
peace: Peace is a time without war. / In peace {people can live|everyone can live} {without fear|safely}.
courage: Courage means {to do what is right|doing what you must} although you are afraid.
law: A law is a rule that {everyone in a country|all people in a country} must follow.
money: Money is what we {use to buy|pay with when we buy} things. / {It can be|There are} coins {or paper|and notes}.
""".strip()


def _definitions() -> list[Topic]:
    blocks = []
    for line in WORDS.splitlines():
        word, _, body = line.partition(": ")
        noun = ("an " if word[0] in "aeiou" else "a ") + word
        if (
            word
            in (
                "rain snow wind winter spring summer autumn bread water ice fire milk tea music war peace courage money"
            ).split()
        ):
            noun = word
        if word in ("sea", "sun", "moon", "earth"):
            noun = f"the {word}"
        asked = f'? {{What is {noun}?|What does the word "{word}" mean?|Explain the word {word}.|What is {noun}?|Define {word}.}}'
        blocks.append(f"# {word} 1 3\n{asked}\n" + "\n-\n".join(part.strip() for part in body.split(" / ")))
    return parse_topics("\n\n".join(blocks))


DEFINITIONS = _definitions()

ADVICE = parse_topics("""
# tea 4 4
? How do I make tea?
? {Tell me|Explain} how to make {tea|a cup of tea}.
{First|To make tea, first} boil {some|fresh} water.
-
Put {a spoon of tea|one spoon of tea leaves} into {the pot|a pot} and pour the {hot|boiling} water over it.
-
Wait {three|four|five} minutes{, then|. Then} {pour it into a cup|fill the cups}.
-
{Add|You can add} {milk, sugar or lemon|a little milk|some sugar} if you like.

# sleep 2 4
? How can I sleep better?
? What helps {to sleep well|against bad sleep}?
{Go to bed|Try to go to bed} at the same time every {day|night}.
-
{Keep the room|The room should be} {dark and cool|quiet and dark}.
-
Do not {eat|drink coffee} {late in the evening|just before bed}.
-
{Read a book|Take a short walk} {in the evening|before you sleep}.

# learning 2 4
? How can I learn {a language|English|faster}?
? {Give me|Do you have} some advice for learning{.|?}
{Learn|Try to learn} a little every day{, not everything at once|}.
-
{Read|Listen to} {simple stories|texts you like} and {say|write} new words {aloud|in a notebook}.
-
{Do not be afraid of|Do not fear} mistakes: {everybody makes them|they help you to learn}.
-
{Talk to|Speak with} {a friend|other people} as often as you can.

# plants 2 3
? How do I {grow a plant|take care of a plant}?
{Put the seed|Put it} into {good earth|a pot with earth} and {give it water|water it}.
-
{A plant needs|Plants need} light, {so put it|so it should stand} near a window.
-
{Do not give it|Too much water is bad: do not give it} {too much water|more than it can drink}.

# day 2 3
? What should I do today?
? I am bored.
{You could|How about this: you could} {take a walk|go for a walk} {in the park|in the wood|along the river}.
-
{Or read|You can also read} {a good book|a book that you like}.
-
{Call|Write to} {a friend|somebody you have not seen for a long time}.

# weather 1 3
? {What is the weather like|Will it rain} today?
I {cannot see|do not know} the weather, because I {have no window|am only a small program}.
-
{Please look|You can look} out of the window or {ask a weather service|read the news}.

# feelings 1 3
? I am {sad|tired|unhappy} today.
I am sorry to hear that.
-
{Do you want|Would you like} to {tell me why|talk about it}?
-
{Sometimes|Often} {a walk|some rest|a cup of tea} helps.

# joke 1 1
? Tell me a joke.
Why did the {packet|UDP packet} never {come home|arrive}? {Nobody|Because nobody} {waited for it|asked where it was}.
I {know|have} a joke about UDP, but {I am not sure|nobody knows} {that you will get it|whether you will get it}.

# read 1 2
? {What should I read|Can you recommend a book}?
You could read {Moby-Dick, the story of a captain and a white whale|a novel by Jane Austen}.
-
{It is old|The book is old}, but {still very good|people still like it}.
""")

SMALL_TALK = (
    ("{hello|hi|hello there|hi there|good morning|good evening}{!|.}", "{hello|hi}! {how can I help you{| today}?|what can I do for you?|what would you like to know?}"),
    ("how are you{| today| doing}?", "{I am {fine|well|doing well}, thank you|very well, thank you}. {and you?|how are you?|what can I do for you?}"),
    ("{I am {fine|well|good}, thanks|I am doing well}.", "{I am glad to hear that|that is good to hear}. {what would you like to talk about?|what would you like to know?}"),
    ("{thank you|thanks|thanks a lot|thank you very much}{!|.}", "{you are welcome|my pleasure}{.|!}{| is there anything else?}"),
    ("{goodbye|bye|see you later|good night}{!|.}", "{goodbye|bye}! {have a {nice|good} day.|see you soon.}"),
    ("{that is right|yes|I agree|you are right}.", "{good|I am glad}. {would you like to know more?|what else would you like to know?}"),
    ("{can you help me|I need help|I have a question}{.|?}", "{of course|yes|sure}. {what is it about?|what would you like to know?|please ask.}"),
    ("{do you speak Russian|can you speak Russian}?", "{yes|a little}. {I know some simple Russian.|you can ask me in Russian.}"),
)  # fmt: skip
SMALL_TALK_RU = (
    ("{привет|здравствуйте|добрый день|доброе утро|добрый вечер}{!|.}", "{здравствуйте|привет}! {чем я могу помочь?|чем помочь?|о чём поговорим?}"),
    ("как {дела|у тебя дела|ты}?", "{спасибо, {всё хорошо|хорошо}|хорошо, спасибо}. {а у вас?|чем я могу помочь?}"),
    ("{спасибо|большое спасибо|благодарю}{!|.}", "{пожалуйста|не за что}{!|.}{| хотите узнать что-нибудь ещё?}"),
    ("{пока|до свидания|спокойной ночи}{!|.}", "{до свидания|всего доброго}! {хорошего дня.|}"),
    ("{помоги мне|можешь помочь|у меня вопрос}.", "{конечно|да}. {что вы хотите узнать?|о чём вопрос?}"),
    ("ты {говоришь|понимаешь} по-русски?", "{да|немного}, {но только простыми словами|я знаю простые слова}."),
)  # fmt: skip

DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
DAYS_RU = "понедельник вторник среда четверг пятница суббота воскресенье".split()
MONTHS = "January February March April May June July August September October November December".split()
OBJECTS = "apples books coins eggs boats stones letters cups pears keys".split()
FACTS = (
    ("a whale", "a fish", False, "whales breathe air and give milk to their young, fish do not"),
    ("a spider", "an insect", False, "insects have six legs and a spider has eight"),
    ("the sun", "a star", True, "stars give light of their own, and the sun does"),
    ("a tomato", "a fruit", True, "a fruit grows from a flower and holds seeds, and a tomato does"),
    ("a bat", "a bird", False, "birds have feathers and lay eggs, a bat has fur"),
    ("ice", "water", True, "ice is what water becomes when it is very cold"),
    ("the moon", "a star", False, "stars give light of their own, the moon only reflects light"),
    ("a penguin", "a bird", True, "a penguin has feathers and lays eggs, although it cannot fly"),
)
Problem = tuple[str, str, str]


def addition(rng: random.Random) -> Problem:
    a, b = rng.randint(1, 20), rng.randint(1, 20)
    question = expand(f"{{what is|how much is}} {a} {{plus|+}} {b}?", rng)
    think = expand(f"{{I need to add|I have to add|this is a sum of}} {a} and {b}. {a} + {b} = {a + b}.", rng)
    return (
        question,
        think,
        expand(f"{{{a} plus {b} is {a + b}.|{a} + {b} = {a + b}.|the answer is {a + b}.|it is {a + b}.}}", rng),
    )


def subtraction(rng: random.Random) -> Problem:
    b, a = sorted((rng.randint(1, 20), rng.randint(1, 20)))
    question = expand(f"{{what is|how much is}} {a} {{minus|-}} {b}?", rng)
    think = expand(f"{{I need to take|I have to take}} {b} away from {a}. {a} - {b} = {a - b}.", rng)
    return question, think, expand(f"{{{a} minus {b} is {a - b}.|{a} - {b} = {a - b}.|the answer is {a - b}.}}", rng)


def multiplication(rng: random.Random) -> Problem:
    a, b = rng.randint(2, 10), rng.randint(2, 10)
    question = expand(f"{{what is|how much is}} {a} times {b}?", rng)
    think = f"{a} times {b} means {a} added {b} times. That is {a * b}."
    return question, think, expand(f"{{{a} times {b} is {a * b}.|the answer is {a * b}.}}", rng)


def counting(rng: random.Random) -> Problem:
    a, b = rng.randint(2, 12), rng.randint(1, 9)
    name, thing = rng.choice("Anna Tom Mia Ben Lily Sam Nora Max".split()), rng.choice(OBJECTS)
    gives = rng.random() < 0.5 and b < a
    verb, sign, total = ("gives away", "-", a - b) if gives else (rng.choice(["buys", "finds", "gets"]), "+", a + b)
    question = (
        f"{name} has {a} {thing} and {verb} {b}{'' if gives else ' more'}. How many {thing} does {name} have now?"
    )
    think = f"{name} starts with {a} {thing}. Then {name} {verb} {b}, so I compute {a} {sign} {b} = {total}."
    return question, think, f"{name} has {total} {thing} now."


def comparison(rng: random.Random) -> Problem:
    a, b = rng.sample(range(1, 100), 2)
    word, best = rng.choice((("larger", max(a, b)), ("smaller", min(a, b))))
    think = f"I compare {a} and {b}. {max(a, b)} is more than {min(a, b)}, so the {word} one is {best}."
    return (
        f"Which number is {word}, {a} or {b}?",
        think,
        expand(f"{{{best} is the {word} number.|the {word} number is {best}.}}", rng),
    )


def next_day(rng: random.Random) -> Problem:
    i, names = rng.choice(((rng.randrange(7), DAYS), (rng.randrange(12), MONTHS)))
    before = rng.random() < 0.4
    other = names[(i + (-1 if before else 1)) % len(names)]
    word = "before" if before else "after"
    unit = "day" if names is DAYS else "month"
    think = f"The {unit}s go in order. {'Before' if before else 'After'} {names[i]} comes {other}."
    return f"Which {unit} comes {word} {names[i]}?", think, f"The {unit} {word} {names[i]} is {other}."


def kinds(rng: random.Random) -> Problem:
    thing, kind, true, why = rng.choice(FACTS)
    think = expand(
        f"{{I should think about what {kind} is.|the question is about {thing}.}} {why[0].upper() + why[1:]}.", rng
    )
    return (
        f"Is {thing} {kind}?",
        think,
        f"{'Yes' if true else 'No'}, {thing} is {'' if true else 'not '}{kind}, because {why}.",
    )


def choice_of_protocol(rng: random.Random) -> Problem:
    use, tcp = rng.choice((
        ("a video call", False), ("a file download", True), ("an online game", False), ("mail", True), ("a web page", True),
        ("live music", False), ("a bank payment", True), ("a voice call", False), ("a name lookup with DNS", False),
    ))  # fmt: skip
    why = expand(
        "{every byte must arrive|nothing may be missing|the data must be complete}"
        if tcp
        else "{a late packet is of no use|it cannot wait for lost packets|speed matters more than a lost packet}",
        rng,
    )
    name = "TCP" if tcp else "UDP"
    think = expand(
        f"the user asks about {use}. {{what matters here?|I must choose a protocol.}} {why}. So {name} fits {{better|best}}.",
        rng,
    )
    return (
        f"Should {use} use TCP or UDP?",
        think,
        expand(f"for {use} {{I would use|you should use|the right choice is}} {name}, because {why.lower()}.", rng),
    )


def addition_ru(rng: random.Random) -> Problem:
    a, b = rng.randint(1, 20), rng.randint(1, 20)
    question = expand(f"сколько будет {a} {{плюс|+}} {b}?", rng)
    think = expand(f"{{нужно сложить|надо сложить}} {a} и {b}. {a} + {b} = {a + b}.", rng)
    return question, think, expand(f"{{{a} плюс {b} будет {a + b}.|ответ: {a + b}.|будет {a + b}.}}", rng)


def next_day_ru(rng: random.Random) -> Problem:
    i = rng.randrange(7)
    other = DAYS_RU[(i + 1) % 7]
    after = "понедельника вторника среды четверга пятницы субботы воскресенья".split()[i]
    think = f"Дни недели идут по порядку. После {after} идёт {other}."
    return f"Какой день идёт после {after}?", think, f"После {after} идёт {other}."


def choice_of_protocol_ru(rng: random.Random) -> Problem:
    use, tcp = rng.choice((
        ("звонка", False), ("загрузки файла", True), ("игры", False), ("почты", True), ("страницы", True), ("прямого эфира", False),
    ))  # fmt: skip
    why = expand(
        "{важен каждый байт|нельзя ничего потерять}" if tcp else "{ждать нельзя|старые данные не нужны}", rng
    ).lower()
    name = "TCP" if tcp else "UDP"
    think = f"Вопрос о том, что лучше для {use}. Здесь {why}. Значит, лучше {name}."
    return f"Что лучше для {use}, TCP или UDP?", think, f"Для {use} лучше {name}, потому что {why}."


PROBLEMS: tuple[Callable[[random.Random], Problem], ...] = (
    addition, subtraction, multiplication, counting, comparison, next_day, kinds, choice_of_protocol,
)  # fmt: skip
PROBLEMS_RU = (addition_ru, next_day_ru, choice_of_protocol_ru)
THOUGHTS = (
    "{the user asks|the question is} {about $t|what I know about $t}. {I will answer in simple words.|I should give a short answer.|I will explain it step by step.}",
    "{this is a question about $t|the user wants to know something about $t}. {first|I will begin with} the main point{, then an example|}.",
    "{I should explain|let me think about} $t. {a short answer is best.|simple words are best.}",
)  # fmt: skip
THOUGHTS_RU = (
    "{пользователь спрашивает|вопрос}: $t. {нужно ответить просто.|я отвечу коротко и ясно.|сначала главное, потом пример.}",
    "{это вопрос на тему|тема}: $t. {отвечу простыми словами.|ответ должен быть коротким.}",
)  # fmt: skip
STORY_THOUGHTS = (
    "the user wants a story. {it should be short and have a good end.|I will think of a child, an animal and a small problem.}",
    "I need {a hero, a problem and an end|someone who meets a friend}. {then|} I can {begin|tell it}.",
)  # fmt: skip
STORY_THOUGHTS_RU = (
    "{пользователь просит сказку|нужна сказка}. {пусть она будет короткой и доброй.|нужны герой, беда и хороший конец.}",
)
