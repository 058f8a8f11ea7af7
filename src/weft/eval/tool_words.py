"""The words of the tools task: verbs and how a user says them, nouns, and the keys of arguments."""

from __future__ import annotations

LEADS: dict[str, tuple[str, ...]] = {
    "get": ("What is the {noun}", "What is the {noun}", "What's the {noun}", "Get the {noun}",
            "Get me the {noun}", "Tell me the {noun}", "Show me the {noun}", "I need the {noun}",
            "Give me the {noun}", "Please get the {noun}", "Can you get the {noun}"),
    "find": ("Find the {noun}", "Where is the {noun}", "Look for the {noun}", "Find me a {noun}"),
    "search": ("Search the {noun}", "Search for a {noun}", "Search for the {noun}"),
    "send": ("Send the {noun}", "Send a {noun}", "Please send the {noun}"),
    "create": ("Create a {noun}", "Make a {noun}", "Create the {noun}", "I want a new {noun}"),
    "add": ("Add a {noun}", "Add the {noun}", "Please add a {noun}"),
    "delete": ("Delete the {noun}", "Remove the {noun}", "Please delete the {noun}"),
    "set": ("Set the {noun}", "Set a {noun}", "Change the {noun}"),
    "book": ("Book a {noun}", "Book the {noun}", "Please book a {noun}", "I want to book a {noun}"),
    "cancel": ("Cancel the {noun}", "Please cancel the {noun}", "Cancel my {noun}"),
    "check": ("Check the {noun}", "Is there a {noun}", "Please check the {noun}"),
    "open": ("Open the {noun}", "Please open the {noun}"),
    "start": ("Start the {noun}", "Start a {noun}", "Begin the {noun}"),
    "list": ("List the {noun}", "List every {noun}", "Show every {noun}"),
    "read": ("Read the {noun}", "Read me the {noun}"),
    "play": ("Play the {noun}", "Play a {noun}"),
    "order": ("Order a {noun}", "Order the {noun}", "I want to order a {noun}"),
    "lookup": ("Look up the {noun}", "Please look up the {noun}", "What is the {noun}"),
}  # fmt: skip
UMBRELLAS = ("Do I need an umbrella in {place}?", "Is it cold in {place}?", "Is it raining in {place}?",
             "Is it warm in {place}?", "How is the weather in {place}?", "Weather in {place}")  # fmt: skip
NOUNS = (
    "weather", "weather", "weather", "forecast", "temperature", "order", "ticket", "flight", "train",
    "hotel", "table", "user", "customer", "price", "stock", "invoice", "email", "message", "note",
    "task", "reminder", "alarm", "timer", "meeting", "event", "calendar", "light", "door", "song",
    "movie", "book", "recipe", "restaurant", "route", "map", "address", "population", "capital",
    "distance", "translation", "rate", "currency", "balance", "payment", "package", "parcel", "contact",
    "file", "folder", "report", "photo", "news", "score", "team", "player", "car", "taxi", "seat",
    "menu", "coffee", "pizza", "status", "server", "backup", "job", "build", "log", "document", "page",
    "definition", "word", "holiday", "birthday", "time", "date", "country", "language", "shop",
    "product", "item", "review", "comment", "post", "video", "playlist", "game", "garden", "lamp",
    "window", "heating", "bus", "station", "airport", "street", "house", "budget", "contract", "lesson",
    "course", "exam", "doctor", "appointment", "medicine", "animal", "plant", "colour", "size", "weight",
)  # fmt: skip
PREPOSITIONS = ("of", "of", "for", "for", "in", "in", "at", "from", "to", "on")
SUBJECT_KEYS = (
    "city", "city", "city", "name", "name", "person", "place", "title", "customer", "country", "query",
    "location", "id", "station", "user", "topic", "symbol", "street", "product", "to", "subject",
    "item", "company", "destination", "address",
)  # fmt: skip
NUMBER_KEYS = (
    "days", "days", "count", "amount", "number", "hours", "minutes", "year", "limit", "quantity",
    "price", "page", "seats", "level", "size", "people",
)  # fmt: skip
OTHER_KEYS = ("date", "owner", "from", "room", "group", "category", "author", "driver", "colour", "brand")
TEXT_KEYS = ("text", "message", "note", "body", "comment")
ENUMS: dict[str, tuple[str, ...]] = {
    "unit": ("celsius", "fahrenheit"), "size": ("small", "medium", "large"), "mode": ("fast", "slow"),
    "state": ("on", "off"), "format": ("short", "long"), "class": ("first", "second"),
    "priority": ("low", "normal", "high"), "when": ("today", "tomorrow"), "colour": ("red", "green", "blue"),
    "currency": ("euro", "dollar", "pound"), "language": ("english", "french", "german"),
}  # fmt: skip
REAL_NAMES = (
    "Paris", "London", "Berlin", "Oslo", "Rome", "Madrid", "Vienna", "Lisbon", "Tokyo", "Boston",
    "Chicago", "Prague", "Warsaw", "Dublin", "Athens", "Cairo", "Delhi", "Sydney", "Toronto", "Moscow",
    "Anna", "Peter", "Maria", "John", "Alice", "Bob", "Ada", "Alan", "Grace", "Linus", "Emma", "Tom",
    "Lisa", "Max", "France", "Spain", "Italy", "Germany", "Japan", "Norway", "Monday", "Friday",
)  # fmt: skip
