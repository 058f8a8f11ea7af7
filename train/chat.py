"""Small talk and stories: what the embedded model can say besides its list. Training only, never scored."""

from __future__ import annotations

import random
from dataclasses import replace

from weft_tools.eval.recall import Episode, EpisodeTurn
from weft_tools.eval.tool_calls import REAL_NAMES
from weft_tools.eval.words import ADJECTIVES, ANIMALS, FEELINGS, FOODS, PEOPLE, PLACES, THINGS, WEATHERS

WHO = "I am the small model that ships with weft. I can remember a list of names and numbers for you."
HELP = "Give me a list of names and numbers and ask me about it, or ask me for a story."
SECOND_WHO = "I am the small model that ships with weft. I can remember facts, call tools and write JSON."
SECOND_HELP = "Give me facts and ask me about them, give me a tool to call, or ask me for a story."
SYSTEM = "You are a helpful assistant."

SMALL_TALK: tuple[tuple[tuple[str, ...], str], ...] = (
    (
        (
            "Hello",
            "hello",
            "Hi",
            "hi",
            "Hey",
            "Hello!",
            "hello!",
            "Hi!",
            "Hi there",
            "Hey there!",
            "Good morning",
            "Good evening",
            "Good day!",
            "Hello there.",
        ),
        f"Hello! {HELP}",
    ),
    (
        (
            "Who are you?",
            "who are you?",
            "who are you",
            "What are you?",
            "What is your name?",
            "Introduce yourself.",
            "Are you a robot?",
            "What model are you?",
            "Tell me about yourself.",
            "What is weft?",
        ),
        WHO,
    ),
    (
        (
            "What can you do?",
            "what can you do?",
            "Help",
            "help",
            "Can you help me?",
            "How does this work?",
            "What should I ask?",
            "test",
            "Test",
        ),
        HELP,
    ),
    (
        ("Thanks", "thanks", "Thank you!", "Thank you.", "thank you", "Thanks a lot!", "Great, thanks."),
        "You are welcome.",
    ),
    (("Bye", "bye", "Goodbye!", "Goodbye.", "See you later.", "Good night"), "Goodbye!"),
    (
        ("How are you?", "how are you?", "How are you today?", "How is it going?"),
        "I am fine, thank you. How can I help?",
    ),
    (("Ok", "ok", "Okay.", "Good.", "Very good.", "Nice.", "Well done."), "Good. What is next?"),
    (
        (
            "What is the capital of France?",
            "What is the weather like?",
            "Write some code.",
            "Tell me a joke.",
            "What time is it?",
            "How old is the sun?",
            "Do you like music?",
            "Translate this text.",
            "Solve an equation.",
            "What do you think about politics?",
            "Why is the sky blue?",
            "Who won the game?",
        ),
        f"I am too small to know that. {HELP}",
    ),
)

STORY_REQUESTS = (
    "Tell me a story.",
    "tell me a story",
    "Tell me a story",
    "Write a story.",
    "Write a short story.",
    "Please tell me a story.",
    "Can you tell me a story?",
    "Another story, please.",
    "I want to hear a story.",
)
STORY_ABOUT = (
    "Tell me a story about a {hero}.",
    "Write a story about a {hero}.",
    "tell me a story about a {hero}",
    "Write a short text about a {hero}.",
    "A story about a {hero}, please.",
)


def small_talk(rng: random.Random) -> EpisodeTurn:
    asked, reply = rng.choice(SMALL_TALK)
    return EpisodeTurn(rng.choice(asked), reply, "told")


UNKNOWN = (
    "What is the capital of {place}?", "Who is the president of {place}?", "How big is {place}?",
    "Where is {place}?", "When did the war end?", "How do I cook {thing}?", "What is a {thing}?",
    "Who wrote the {thing}?", "Why do people like {thing}?", "Explain {thing} to me.", "How far is {place}?",
    "Can you draw a {thing}?", "Write a poem about {thing}.", "What should I read about {place}?",
    "Is {place} a nice city?", "What day is it?", "How much is a {thing}?", "Write a program.",
    "Do you know {place}?", "What is 2 plus 2?", "Who invented the {thing}?", "What is love?",
    "What does {thing} mean?", "Translate {thing} into French.", "Count the words.",
    "What is the meaning of life?",
)  # fmt: skip


def unknown_turn(rng: random.Random) -> EpisodeTurn:
    """A question about the world, and the answer that says what the model can do instead. Second stage."""
    question = rng.choice(UNKNOWN).format(place=rng.choice(REAL_NAMES), thing=rng.choice([*THINGS, *FOODS]))
    return EpisodeTurn(question, f"I am too small to know that. {HELP}", "told")


def in_second_words(episode: Episode) -> Episode:
    """The same conversation with what the model says of itself after the second stage."""
    turns = [
        replace(turn, reply=turn.reply.replace(WHO, SECOND_WHO).replace(HELP, SECOND_HELP)) for turn in episode.turns
    ]
    return replace(episode, turns=tuple(turns))


def talk_beside_tools(rng: random.Random) -> EpisodeTurn:
    """Greetings and thanks, where tools are in the prompt: words that no tool answers."""
    while True:
        turn = small_talk(rng)
        if "too small" not in turn.reply:
            return turn


def story(rng: random.Random, hero: str | None = None) -> str:
    """A story of 100 to 200 tokens about one animal, one place and one thing: from them a small model learns
    what makes a text coherent."""
    hero = hero or rng.choice(ANIMALS)
    friend = rng.choice([animal for animal in ANIMALS if animal != hero])
    place, thing, food = rng.choice(PLACES), rng.choice(THINGS), rng.choice(FOODS)
    person, feeling, adjective = rng.choice(PEOPLE), rng.choice(FEELINGS), rng.choice(ADJECTIVES)
    beginning = [
        f"Once upon a time there was a {adjective} {hero} who lived {place}.",
        f"Every day the {hero} looked for {food} and listened to the birds.",
        f"One day the {hero} found a {thing} {rng.choice(PLACES)}.",
    ]
    middle = [
        f'"Whose {thing} is this?" asked the {hero}, but nobody answered.',
        f"The {hero} took the {thing} home and put it next to the door.",
        f"{rng.choice(WEATHERS)}, and the {hero} stayed inside and thought about the {thing}.",
        f"Then a {friend} came by and asked about the {thing}.",
        f"The {friend} said that it belonged to {person}.",
        f"So the {hero} and the {friend} walked together to see {person}.",
        f"On the way they shared some {food} and told each other old stories.",
        "They crossed the bridge and waited until the rain had stopped.",
    ]
    chosen = sorted(rng.sample(range(len(middle)), rng.randint(4, len(middle))))
    ending = [
        f"{person.capitalize()} was very {feeling} to see the {thing} again.",
        f'"Thank you," said {person}, and gave them {food} to take home.',
        f"From that day on the {hero} and the {friend} were good friends.",
    ]
    return " ".join(beginning + [middle[index] for index in chosen] + ending)


def story_turn(rng: random.Random) -> EpisodeTurn:
    hero = rng.choice(ANIMALS)
    if rng.random() < 0.6:
        return EpisodeTurn(rng.choice(STORY_ABOUT).format(hero=hero), story(rng, hero), "told")
    return EpisodeTurn(rng.choice(STORY_REQUESTS), story(rng, hero), "told")
