r"""Take the answer out of a completion and compare it with the gold.

Where an answer may stand is a policy. Each policy reads all that the one
before it reads, and one thing more:

=============  ==========================================================
``"tagged"``   the last closed <answer> block after the reasoning
``"stated"``   else the last final statement: a box, ``#### 8``,
               "the answer is 8", ``**Answer:** 8``
``"flexible"`` else the last number in the text
=============  ==========================================================

Training uses ``"tagged"``, the strictest. Evaluation may use another, to be
fair to a model that was never told of the tags, and says which one it used.

No policy reads past the first end-of-turn token, and none reads inside the
reasoning: only what follows the last reasoning tag counts, and where that tag
is an opening one, the completion was cut off and gave no answer.

Every pattern here runs in linear time, whatever the text.
"""

import re

from rewards.batch import RewardError, completion_texts
from rewards.numbers import last_box, parse_number

POLICIES = ("tagged", "stated", "flexible")
MAX_STATEMENT_CHARS = 100  # a number with its unit fits easily

_END_OF_TURN = re.compile(
    r"<\|(?:im_end|eot_id|eom_id|end_of_text|endoftext|end)\|>"
    r"|<end_of_turn>|<eos>|</s>"
)
_REASONING_TAG = re.compile(r"<(/?)(?:reasoning|think)>")
_ANSWER_TAG = re.compile(r"</?answer>")
_LABEL = re.compile(r"####|\banswer[*_\s]*(?:is\b|[:=])", re.IGNORECASE)
_LABEL_END = re.compile(r"[\s*_:]*")
# Where the sentence ends, or goes on after a comma: "72, in total, so ..."
# A comma before a digit or an "and" stays: "3, 5" is not the number 3.
_STATEMENT_END = re.compile(
    r"\n|[.;?](?=[\s*_]|$)|,\s+(?=[A-Za-z])(?!(?:and|or)\b)"
)
_MIXED_NUMBER = re.compile(r"[-\u2212+$(]*[0-9]+ (?:[0-9]+/|\\[dtc]?frac)\S+")


def first_turn(text):
    """Return `text` up to the first end-of-turn token.

    >>> first_turn("<answer>18</answer><|im_end|>\\n<answer>5</answer>")
    '<answer>18</answer>'
    """
    return _END_OF_TURN.split(text, maxsplit=1)[0]


def read_turns(completions, prefilled=""):
    r"""Return what the policy said in each completion of a batch, as texts.

    `completions` is what a trainer hands over, the result has one string for
    each, cut at the first end-of-turn token. Some chat templates write the
    opening reasoning tag themselves, so that the completion begins after it:
    `prefilled` is the text that the template wrote, and is put in front.
    Raises RewardError when `prefilled` is anything but one opening reasoning
    tag and white space, as it would count as said by the policy.

    >>> read_turns(["So.</think> 18<|im_end|>"], prefilled="<think>\n")
    ['<think>\nSo.</think> 18']
    """
    if prefilled and not (
        isinstance(prefilled, str)
        and prefilled.strip() in ("<reasoning>", "<think>")
    ):
        raise RewardError(
            f"The prefilled text is {prefilled!r:.60}, but it may only be the "
            "opening reasoning tag that the chat template writes at the start "
            "of a completion, with white space. Type "
            r"prefilled='<think>\n' or prefilled='<reasoning>\n' as your "
            "template has it, or leave it out."
        )
    return [
        prefilled + first_turn(text) for text in completion_texts(completions)
    ]


def extract_answer(completion, policy="tagged"):
    r"""Return the answer that `completion` gives, as text, or None.

    `completion` is a string, `policy` one of POLICIES (see the head of this
    module). Inside the tags, a box or a final statement is unwrapped. An
    empty answer block gives "". Raises RewardError for an unknown policy.

    >>> extract_answer("<reasoning>9+9</reasoning><answer>\n18\n</answer>")
    '18'
    >>> extract_answer("<think>So</think><answer>$\\boxed{18}$</answer>")
    '18'
    >>> text = "She sold 9 and 9. The answer is **18**, in all. Fine by 2?"
    >>> [extract_answer(text, policy) for policy in POLICIES]
    [None, '18', '18']
    >>> extract_answer("9 + 9 makes 18.", "flexible")
    '18'
    >>> extract_answer("<reasoning>9 + 9 makes 18", "flexible") is None
    True
    """
    if policy not in POLICIES:
        raise RewardError(
            f"There is no policy {policy!r} for reading an answer. Choose "
            f"one of {', '.join(map(repr, POLICIES))}."
        )
    text = _after_reasoning(first_turn(completion))
    tagged = _last_closed_answer(text)
    if tagged is not None:
        return _final_statement(tagged) or tagged.strip()
    # An <answer> that was never closed was cut off: "7" may stand for "72".
    if policy == "tagged" or "<answer>" in text:
        return None
    stated = _final_statement(text)
    if stated or policy == "stated":
        return stated
    return _last_number(text)


def gold_number(gold):
    r"""Return the number in a gold answer as a Fraction, or None.

    `gold` is a number, the text of a number, a solution that ends with
    GSM8K's ``#### N``, or one that states its answer in a box or in words.
    None means that the gold can't be read as one number.

    >>> gold_number("9 + 9 = 18 clips.\n#### 18")
    Fraction(18, 1)
    >>> gold_number(r"Hence the answer is $\boxed{\frac{9}{7}}$.")
    Fraction(9, 7)
    >>> gold_number(-2.5)
    Fraction(-5, 2)
    >>> print(gold_number("no number in here"), gold_number(None))
    None None
    """
    text = str(gold)
    _, marker, after = text.rpartition("####")
    if marker:
        return parse_number(after)
    return parse_number(_final_statement(text) or text)


def is_correct(completion, gold, policy="tagged"):
    """Tell whether the answer in `completion` equals the gold number.

    Returns True, False, or None when the gold can't be read: then nobody
    knows, and a reward must neither pay nor punish.

    >>> is_correct("<answer>1,000.0</answer>", "#### 1000")
    True
    >>> is_correct("That makes 1000.", "#### 1000")
    False
    >>> is_correct("That makes 1000.", "#### 1000", policy="flexible")
    True
    >>> is_correct("<answer>None</answer>", "no number in here") is None
    True
    """
    expected = gold_number(gold)
    answer = extract_answer(completion, policy)
    if expected is None:
        return None
    return answer is not None and parse_number(answer) == expected


def _after_reasoning(text):
    """Return what follows the last reasoning tag; "" if that tag opens."""
    tags = list(_REASONING_TAG.finditer(text))
    if not tags:
        return text
    closes = tags[-1][1] == "/"
    return text[tags[-1].end() :] if closes else ""


def _last_closed_answer(text):
    """Return what is in the last <answer> directly followed by </answer>."""
    answer = opener = None
    for tag in _ANSWER_TAG.finditer(text):
        if tag[0] == "<answer>":
            opener = tag
        elif opener:
            answer, opener = text[opener.end() : tag.start()], None
    return answer


def _final_statement(text):
    """Return the box or the labelled number that stands last, or None."""
    box = last_box(text)
    label = _last_labelled_number(text)
    if box and label:
        return max(box, label)[1]  # both are (position, text)
    return (box or label or (0, None))[1]


def _last_labelled_number(text):
    """Return (position, text) of the last label that a number follows.

    A label without a number ("Answer: let us see", a heading "#### Step")
    is no statement.
    """
    for label in reversed(list(_LABEL.finditer(text))):
        start = _LABEL_END.match(text, label.end()).end()
        rest = text[start : start + MAX_STATEMENT_CHARS]
        statement = _STATEMENT_END.split(rest, maxsplit=1)[0].strip(" *_`")
        if parse_number(statement) is not None:
            return label.start(), statement
    return None


def _last_number(text):
    """Return the last word with a digit in it, or None.

    The whole word, so that "5x+3" does not pass for 3, but only what follows
    an equals sign, and with the integer before it when it is a mixed number.
    """
    words = text.split()
    while words and not re.search("[0-9]", words[-1]):
        words.pop()
    if not words:
        return None
    number = words[-1].rpartition("=")[2]
    pair = " ".join(words[-2:]).rpartition("=")[2].strip()
    if _MIXED_NUMBER.fullmatch(pair):
        number = pair
    return number.strip("()*_`").rstrip("()*_`.,;:!?")
