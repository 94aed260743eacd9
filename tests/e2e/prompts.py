"""Twenty prompts of several kinds, written for these tests."""

_CHAT = [
    "What is the capital of France?",
    "Write a short story about a lighthouse keeper who collects clocks.",
    "Explain why the sky is blue to a ten-year-old.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "List five fruits that are red.",
    "Translate 'good morning, my friend' into Spanish.",
    "What is 17 times 23? Show the steps.",
    "Give me a recipe for pancakes.",
    "Summarise in two sentences what photosynthesis does.",
    "Who wrote Romeo and Juliet, and when?",
    "Write a polite e-mail that declines an invitation to a wedding.",
    "Name three differences between a frog and a toad.",
    "Write a haiku about rain on a tin roof.",
    "How do I sort a list of dictionaries by a key in Python?",
]

_TEXT = [
    "Once upon a time, in a village at the edge of the forest,",
    "The three most important inventions of the nineteenth century are",
    "def quicksort(values):\n",
    "Dear Sir or Madam,\n\nI am writing to",
    "1, 1, 2, 3, 5, 8, 13,",
    "Über den Wolken ist die Freiheit — naïve café 東京 🙂",
]

PROMPTS = [*([{"role": "user", "content": text}] for text in _CHAT), *_TEXT]
"""Chat messages and plain texts."""

TEXTS = [*_CHAT, *_TEXT]
"""The same as plain texts, for checkpoints without a chat template."""
