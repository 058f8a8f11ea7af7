"""A text of about 700 tokens, written for this folder: prose, numbers, a list, code."""

TEXT = """\
The ferry to Nordholm leaves at 6:40 in the morning, and whoever misses it waits until noon. Marta knew this, and
still she stopped at the bakery, because the baker had promised her the first loaf of rye. It was 6:31. The street was
wet, the lamps were still on, and a cat crossed the square as if it owned every stone of it.

"You are late," said the baker. He wrapped the bread in paper and took two coins.

"I am always late," said Marta. "The ferry is later."

On the quay stood eleven people and a horse. The captain counted them twice. In 1998 he had carried 312 passengers on
one afternoon, when the bridge at Lund was closed, and since that day he counted everything: waves, gulls, the minutes
between two bells. He had written the numbers into a book with a green cover, and nobody had ever read it.

What the book says:

- 4 March: 17 passengers, 2 bicycles, wind from the west at 9 metres per second.
- 5 March: 23 passengers, no bicycles. The engine needed 41 litres of oil.
- 6 March: 11 passengers and a horse. The horse was calm until we passed the lighthouse.

Marta was going to the island to repair a clock. The clock of the town hall had stopped at a quarter past three, and
it had stopped three times before, always in spring. She had a theory about this. When the snow melts, the wood of the
tower takes up water; the frame bends by less than a millimetre, and the escapement, which was built in 1764 by a man
who trusted nobody, refuses to go on. A younger clock would not notice. An older one would not care.

In the train she had written a small program that turned the readings of her sensor into a table:

```python
def drift(readings):
    first = readings[0]
    return [round(value - first, 3) for value in readings]

print(drift([20.125, 20.130, 20.118, 20.127]))
```

The numbers were too small to mean anything, and that was what she wanted to know. If the frame did not bend, then
something else stopped the clock, and in that case she would have to climb up at night and listen.

The captain came by and looked at the paper bag. "Is that the rye?" he asked. She broke the loaf in two and gave him
the larger half. He looked at it for a while, then at the sea, then at her.

"The clock," he said. "You will find nothing wrong with it. My grandfather wound it for forty years. Every spring, on
the first warm day, the whole town went to the beach, and nobody was left to wind it. It stops because people are
happy."

Marta wrote this down under the table, next to the fourth number, and drew a line below it.
"""
