"""Drawing the page: a pure function of the settings, the expression, the look's seed and the wrong answers so far."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import lru_cache

from PIL import Image, ImageDraw, ImageFont

from .fonts import FONTS, font_path
from .screenshot_math_options import Settings

Colour = tuple[int, int, int]
WHITE: Colour = (255, 255, 255)
INK: Colour = (20, 20, 20)
RED: Colour = (200, 20, 20)
GREY: Colour = (130, 130, 130)
BLUE: Colour = (25, 60, 130)
BARS: tuple[Colour, ...] = (BLUE, (20, 95, 70), (110, 40, 110), (60, 60, 70), (150, 70, 10))
PAPERS: tuple[Colour, ...] = (WHITE, (250, 248, 240), (240, 245, 250), (245, 250, 243))
NAVIGATION = ("Home", "Lessons", "Profile", "Scores", "Settings", "Help")
SLOTS = ((0.66, 0.05), (0.66, 0.21), (0.66, 0.51), (0.04, 0.88), (0.36, 0.88), (0.68, 0.88), (0.04, 0.94), (0.36, 0.94))
SHOWN = {"*": "×", "-": "−"}


@dataclass(frozen=True)
class Attempt:
    """A wrong answer, and where the right one lies ("higher" | "lower")."""

    answer: int
    hint: str


@lru_cache(maxsize=64)
def load_font(name: str, size: int) -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(str(font_path(name)), size)


def draw_page(settings: Settings, expression: str, seed: int, attempts: tuple[Attempt, ...] = ()) -> Image.Image:
    """The RGB page, `settings.width` x `settings.height`: equal arguments give equal pixels."""
    shown = "".join(SHOWN.get(character, character) for character in expression)
    if settings.cell:
        return _grid_page(settings, shown, attempts)
    return _FreePage(settings, random.Random(seed)).draw(shown, attempts)


def _grid_page(settings: Settings, expression: str, attempts: tuple[Attempt, ...]) -> Image.Image:
    """Four rows of cells: header, expression, input box with the last wrong answer crossed out, hint."""
    cell, columns = settings.cell, settings.width // settings.cell
    page = Image.new("RGB", (settings.width, settings.height), WHITE)
    pen = ImageDraw.Draw(page)
    font = load_font("mono" if settings.font == "any" else settings.font, settings.font_size)

    def write(text: str, row: int, colour: Colour) -> None:
        for column, character in enumerate(text[:columns]):
            middle = (column * cell + cell / 2, row * cell + cell / 2)
            pen.text(middle, character, fill=colour, font=font, anchor="mm")

    pen.rectangle((0, 0, settings.width, cell - 1), fill=BLUE)
    write("MATH", 0, WHITE)
    write(f"{expression}=", 1, INK)
    pen.rectangle((0, 2 * cell, columns * cell - 1, 3 * cell - 1), outline=GREY)
    if attempts:
        last = attempts[-1]
        wrong = str(last.answer)[:columns]
        write(wrong, 2, INK)
        write(f"?{'>' if last.hint == 'higher' else '<'}{wrong}", 3, INK)
        for column in range(len(wrong)):
            left, top = column * cell, 2 * cell
            pen.line((left + 1, top + cell - 2, left + cell - 2, top + 1), fill=RED, width=2)
    return page


class _FreePage:
    """A page whose parts move by up to `jitter` pixels; the numbers below are shares of its width or height."""

    def __init__(self, settings: Settings, rng: random.Random) -> None:
        self.settings = settings
        self.rng = rng
        self.width, self.height = settings.width, settings.height
        self.font = rng.choice(sorted(FONTS)) if settings.font == "any" else settings.font
        varied = settings.jitter > 0
        self.bar = rng.choice(BARS) if varied else BLUE
        self.paper = rng.choice(PAPERS) if varied else WHITE
        self.small = max(9, min(settings.font_size // 2, self.height // 22))
        self.page = Image.new("RGB", (self.width, self.height), self.paper)
        self.pen = ImageDraw.Draw(self.page)

    def draw(self, expression: str, attempts: tuple[Attempt, ...]) -> Image.Image:
        self._header()
        self._distractors()
        x, y = self._moved(0.08, 0.24)
        self._text((x, y), "Work out:", self.small, GREY)
        self._text((x, y + self.small * 1.3), f"{expression} =", self._fitting(f"{expression} =", x), INK)
        self._box(attempts)
        return self.page

    def _moved(self, across: float, down: float) -> tuple[int, int]:
        jitter = self.settings.jitter
        return (
            int(self.width * across) + self.rng.randint(-jitter, jitter),
            int(self.height * down) + self.rng.randint(-jitter, jitter),
        )

    def _text(self, at: tuple[float, float], text: str, size: int, colour: Colour, anchor: str = "la") -> None:
        self.pen.text(at, text, fill=colour, font=load_font(self.font, size), anchor=anchor)

    def _fitting(self, text: str, left: float) -> int:
        """The largest font size up to the chosen one with which the text ends before the right margin."""
        size = self.settings.font_size
        wide = load_font(self.font, size).getlength(text)
        room = self.width * 0.96 - left
        return size if wide <= room else max(8, int(size * room / wide))

    def _header(self) -> None:
        bottom = int(self.height * 0.16)
        self.pen.rectangle((0, 0, self.width, bottom), fill=self.bar)
        self._text((self.width * 0.04, bottom / 2), "Arithmetic", min(bottom * 3 // 5, self.small * 2), WHITE, "lm")

    def _box(self, attempts: tuple[Attempt, ...]) -> None:
        left, top = self._moved(0.08, 0.61)
        high, wide = int(self.height * 0.15), int(self.width * 0.44)
        self.pen.rectangle((left, top, left + wide, top + high), fill=WHITE, outline=GREY, width=2)
        button = (left + wide + self.small, top, left + wide + self.small + int(self.width * 0.24), top + high)
        self.pen.rectangle(button, fill=self.bar)
        self._text(((button[0] + button[2]) / 2, top + high / 2), "Check", self.small, WHITE, "mm")
        under = top + high + self.small // 2
        if not attempts:
            self._text((left, under), "Type your answer", self.small, GREY)
            return
        self._crossed([str(attempt.answer) for attempt in attempts], left, top, high, wide)
        last = attempts[-1]
        self._text((left, under), f"Not {last.answer}. It is {last.hint}.", self.small, RED)

    def _crossed(self, answers: list[str], left: int, top: int, high: int, wide: int) -> None:
        """Every wrong answer, struck through in red; in a size at which all fit into the box."""
        joined = " ".join(answers)
        size = int(high * 0.7)
        size = max(8, min(size, int(size * wide * 0.9 / load_font(self.font, size).getlength(joined))))
        x, middle = left + self.small / 2, top + high / 2
        for answer in answers:
            length = load_font(self.font, size).getlength(answer)
            self._text((x, middle), answer, size, INK, "lm")
            line = (x - 2, middle + size * 0.3, x + length + 2, middle - size * 0.3)
            self.pen.line(line, fill=RED, width=max(3, high // 10))
            x += load_font(self.font, size).getlength(answer + " ")

    def _distractors(self) -> None:
        """Things a page has that are not the task: navigation, a clock, sums already solved. Up to one a slot."""
        size = max(8, self.small * 5 // 6)
        for across, down in self.rng.sample(SLOTS, self.settings.distractors):
            colour = WHITE if down < 0.1 else GREY
            self._text((self.width * across, self.height * down), self._distraction(), size, colour)

    def _distraction(self) -> str:
        rng = self.rng
        a, b = rng.randint(1, 99), rng.randint(1, 99)
        solved = f"✓ {a} + {b} = {a + b}"
        return rng.choice((rng.choice(NAVIGATION), f"{rng.randint(0, 23):02}:{rng.randint(0, 59):02}", solved))
