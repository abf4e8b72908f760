"""User prompts made by filling templates. The evaluation prompts of this folder appear here in no form."""

from __future__ import annotations

import random
from collections.abc import Iterator

TOPICS = """volcanoes; the water cycle; photosynthesis; black holes; the French Revolution; supply and demand; vaccines; magnets;
earthquakes; the Roman Empire; electric cars; solar panels; coral reefs; the moon landing; dinosaurs; chess; jazz music; the
printing press; bees; glaciers; tides; the human heart; sleep; memory; language learning; climate change; recycling; wind energy;
the Silk Road; ancient Egypt; the stock market; inflation; interest rates; insurance; budgeting; public transport; bridges;
skyscrapers; bread baking; coffee; tea; chocolate; cheese making; spices; gardening; compost; house plants; dogs; cats; horses;
elephants; whales; sharks; owls; penguins; butterflies; spiders; bacteria in food; the immune system; DNA; evolution; atoms;
chemical bonds; acids and bases; gravity waves; light; sound; lenses; rainbows; thunderstorms; hurricanes; deserts; rainforests;
rivers; mountains; oceans; maps; compasses; GPS; radio; television; telephones; the internet; search engines; passwords;
encryption; databases; operating systems; compilers; sorting algorithms; recursion; neural networks; machine learning; robots;
drones; 3D printing; batteries; engines; airplanes; ships; submarines; bicycles; running; swimming; yoga; football; tennis;
basketball; the Olympic Games; painting; sculpture; photography; film making; theatre; opera; poetry; novels; fairy tales;
myths; Greek gods; Norse legends; dragons; castles; knights; pirates; explorers; space travel; Mars; Jupiter; comets; stars;
galaxies; telescopes; clocks; calendars; leap years; prime numbers; fractions; probability; statistics; geometry; algebra;
calculus; logic puzzles; ethics; philosophy; democracy; elections; constitutions; human rights; the United Nations; taxes;
schools; universities; libraries; museums; hospitals; nurses; doctors; firefighters; farmers; teachers; engineers; artists;
musicians; writers; scientists; Marie Curie; Isaac Newton; Albert Einstein; Leonardo da Vinci; Mozart; Shakespeare; Cleopatra;
Nelson Mandela; Mahatma Gandhi; Martin Luther King; the Great Wall of China; the Eiffel Tower; the Amazon; the Sahara; the Nile;
Antarctica; Japan; Brazil; India; Kenya; Canada; Italy; Mexico; Australia; Iceland; friendship; kindness; courage; patience;
honesty; teamwork; leadership; time management; public speaking; negotiation; stress; meditation; healthy eating; vitamins;
exercise; first aid; headaches; allergies; teeth; eyesight; hearing; posture; moving house; travel planning; camping; fishing;
hiking boots; knitting; sewing; woodworking; pottery; board games; video games; card tricks; puzzles; magic; birthdays; weddings;
festivals; holidays; gifts; customer service; marketing; start-ups; remote teams; job applications; contracts; invoices;
product reviews; newsletters; blogs; podcasts; social media; online safety; fake news; privacy; artificial intelligence;
self-driving cars; nuclear power; hydrogen fuel; plastic waste; endangered species; zoos; national parks; wildfires; floods;
drought; soil; forests; mushrooms; algae; seeds; fruit trees; vegetables; rice farming; fishing boats; markets; money; gold;
diamonds; salt; glass; steel; paper; cotton; wool; leather; soap; perfume; mirrors; candles; kites; balloons; fireworks"""

ABOUT = """Explain {t} to a ten-year-old.
Explain {t} in simple terms.
What is interesting about {t}?
Why does it matter to know about {t}?
Give a short introduction to {t}.
Write a paragraph about {t}.
Write an essay about {t}.
Write a short story that has something to do with {t}.
Write a children's story about {t}.
Write a poem about {t}.
Write a haiku about {t}.
Write a song chorus about {t}.
List five facts about {t}.
List ten words connected with {t} and define each.
Give me three tips about {t} for beginners.
What are the advantages and disadvantages of {t}?
What are common mistakes people make about {t}?
What questions should I ask an expert on {t}?
Make a quiz of five questions about {t}, with answers.
Write a dialogue between two friends about {t}.
Write a speech of one minute about {t}.
Write a blog post about {t}.
Write a product description inspired by {t}.
Write an email to a colleague about a workshop on {t}.
Write a letter to a museum that plans an exhibition about {t}.
Write a press release about a new centre for {t}.
Plan a lesson about {t} for a class of twelve-year-olds.
Make a one-week plan to learn the basics of {t}.
Summarize the most important points about {t}.
Summarize the history of {t}.
How has {t} changed over the last hundred years?
What would the world be like without {t}?
Describe {t} with all five senses.
Invent a riddle whose answer has to do with {t}.
Give me a joke about {t} and explain it.
Suggest a title and an outline for a book about {t}.
I am new to {t}. Where should I start?
My daughter asked me about {t} and I did not know what to say. Help me.
Can you recommend activities related to {t} for a rainy afternoon?
What is the biggest misunderstanding about {t}?
Compare {t} and {u}.
What do {t} and {u} have in common?
Write a story that joins {t} and {u}.
Which is more useful to learn about, {t} or {u}, and why?
Write a table comparing {t} with {u}.
Debate: is {t} more important than {u}? Give both sides.
Give me a metaphor that links {t} to {u}.
Hi! Can you tell me something about {t}?
{t}?
Tell me more about {t}, please, in about 100 words."""

CODE = """adds all even numbers in a list; checks whether a word is a palindrome; counts the vowels in a text; finds the
longest word in a sentence; merges two sorted lists; removes duplicates from a list; computes the factorial of a number;
prints the first n Fibonacci numbers; converts Celsius to Fahrenheit; reads a CSV file and prints each row; writes a
dictionary to a JSON file; counts how often each word occurs; checks whether a year is a leap year; finds the greatest common
divisor of two numbers; tests whether a number is prime; sorts a list of tuples by the second element; flattens a nested
list; rotates a matrix by 90 degrees; multiplies two matrices; validates an email address; generates a random password; draws
a triangle of stars; does a binary search; implements a stack; implements a queue; implements a linked list; computes the
median of a list; transposes a table; finds all anagrams of a word; counts the lines of a file; renames all files in a
folder; downloads a web page; parses a date; computes the distance between two points; simulates rolling two dice; plays
rock, paper, scissors; converts a number to binary; encodes a text with the Caesar cipher; groups a list of people by age;
computes a moving average; finds missing numbers in a sequence; splits a list into chunks; checks whether brackets are
balanced; computes compound interest"""

CODE_ASKS = """Write a Python function that {c}.
Write a Python program that {c}, with comments.
Write code in JavaScript that {c}.
Write a Java method that {c}.
Write a C function that {c}.
Write a Rust function that {c}.
How would you write a function that {c}? Explain step by step.
Write unit tests for a function that {c}."""

TEXTS = """The meeting was moved from Monday to Thursday because two members of the team were ill.|Our shop opens at eight in the
morning and closes at six, but on Saturdays we close at two.|Last summer we drove along the coast, slept in a tent, and ate fish
that we had caught ourselves.|The new library has three floors, a garden on the roof, and a room where children can build
things.|I really like this phone, but the battery is empty by the afternoon and the charger gets hot.|The river rose two metres
in one night, and the people of the village carried their furniture upstairs.|She worked for twenty years as a nurse before she
opened a small school for first aid.|Scientists found that birds in the city sing at a higher pitch than birds in the forest.|The
company sold fewer cars this year, but it earned more with repairs and spare parts.|Please remember that the lift is out of order
and use the stairs at the back of the building.|He forgot his umbrella on the bus, got wet, and laughed about it the whole
evening.|The museum shows paintings by young artists from twelve countries until the end of May."""

TEXT_ASKS = """Summarize this text in one sentence: {x}
Rewrite this text so that it sounds more friendly: {x}
Rewrite the following text in a more formal style: {x}
Make this text shorter: {x}
Make this text longer and more vivid: {x}
Correct any mistakes in this text: {x}
Turn this into bullet points: {x}
What is the main idea of this text? {x}
Translate this into French: {x}
Translate this into Spanish: {x}
Translate this into German: {x}
Write three questions about this text: {x}
Write a reply to this message: {x}
What might happen next? {x}"""

NAMES = [
    "Anna",
    "Ben",
    "Carla",
    "David",
    "Elena",
    "Farid",
    "Grace",
    "Hugo",
    "Irene",
    "Jonas",
    "Keiko",
    "Liam",
    "Maria",
    "Noah",
    "Olga",
    "Paul",
    "Rosa",
    "Sam",
    "Tara",
    "Victor",
]
THINGS = [
    "apples",
    "pencils",
    "tickets",
    "marbles",
    "books",
    "cookies",
    "stamps",
    "oranges",
    "candles",
    "cards",
    "eggs",
    "plants",
]


def arithmetic(rng: random.Random) -> str:
    """One word problem or sum with fresh numbers."""
    a, b, c = rng.randint(2, 99), rng.randint(2, 40), rng.randint(2, 12)
    name, other = rng.sample(NAMES, 2)
    thing = rng.choice(THINGS)
    return rng.choice(
        [
            f"What is {a} + {b}?",
            f"What is {a} times {c}?",
            f"Calculate {a * c} divided by {c} and explain how.",
            f"{name} has {a + b} {thing} and gives {b} to {other}. How many are left?",
            f"A box holds {c} {thing}. How many are in {b} boxes?",
            f"{name} reads {c} pages a day. How long does a book of {c * b} pages take?",
            f"Solve for x: {c}x + {b} = {c * a + b}.",
            f"What is {c * 5}% of {a * 10}?",
            f"A rectangle is {a} cm long and {b} cm wide. What are its area and perimeter?",
            f"{name} is {b} years old and {other} is {c} years older. How old will {other} be in {a} years?",
            f"A car drives {a} km in {c} hours. What is its average speed?",
            f"Write the numbers {a}, {b}, {c} and {a + c} in order, largest first.",
            f"If one of the {thing} costs {c} dollars, how many can {name} buy with {a + 20} dollars?",
            f"What is the next number: {c}, {2 * c}, {4 * c}, {8 * c}?",
        ]
    )


def items(text: str, separator: str) -> list[str]:
    """The entries of a table above, with line breaks undone."""
    return [" ".join(part.split()) for part in text.split(separator)]


def scripted_prompts(count: int, rng: random.Random, heldout_share: float) -> Iterator[tuple[str, bool]]:
    """`count` prompts, each with whether it is held out. Held-out ones use topics and texts that no training prompt has."""
    topics, codes, texts = items(TOPICS, ";"), items(CODE, ";"), items(TEXTS, "|")
    about, code_asks, text_asks = ABOUT.splitlines(), CODE_ASKS.splitlines(), TEXT_ASKS.splitlines()
    for pool in (topics, codes, texts):
        rng.shuffle(pool)
    cut = {id(pool): max(1, len(pool) // 10) for pool in (topics, codes, texts)}
    for _ in range(count):
        heldout = rng.random() < heldout_share

        def pick(pool: list[str], number: int = 1, heldout: bool = heldout) -> list[str]:
            edge = cut[id(pool)]
            return rng.sample(pool[:edge] if heldout else pool[edge:], number)

        kind = rng.random()
        if kind < 0.72:
            t, u = pick(topics, 2)
            text = rng.choice(about).format(t=t, u=u)
        elif kind < 0.82:
            text = rng.choice(code_asks).format(c=pick(codes)[0])
        elif kind < 0.88:
            text = rng.choice(text_asks).format(x=pick(texts)[0])
        else:
            text = arithmetic(rng)
        yield text[0].upper() + text[1:], heldout
