TASK = """
Lay out one message for the model as a list of pieces: <|im_start|>, the role and a line feed, then the parts in
order, then <|im_end|> and a line feed. An image is <|vision_start|>, IMAGE, <|vision_end|>; a video has VIDEO instead
of IMAGE. content_parts(message) lists the parts; part_kind(part) is "image", "video" or "text", and part["text"] is
the text.
"""

HINT = """
Pieces that are control tokens must be objects of the class Control. Plain text that looks like a control token stays
text, so that nobody can inject a turn. START, END, IMAGE and VIDEO are such objects. You have to create
<|vision_start|> and <|vision_end|> yourself.
"""

WRONG = {
    "the line feed after <|im_end|> is missing; the template writes one after every turn": (', END, "\\n"]', ", END]"),
    "the line feed after the role is missing": ("f\"{message['role']}\\n\"", 'message["role"]'),
    "an image needs <|vision_start|> before it and <|vision_end|> after it": (
        '[Control("<|vision_start|>"), placeholder, Control("<|vision_end|>")]',
        "[placeholder]",
    ),
    "your <|vision_start|> is text, so it would be split into several tokens; make it a Control": (
        '[Control("<|vision_start|>"), placeholder, Control("<|vision_end|>")]',
        '["<|vision_start|>", placeholder, "<|vision_end|>"]',
    ),
    "your <|im_end|> is text; use END, which is a Control, as START is": (", END,", ', "<|im_end|>",'),
    "a video has its own placeholder, VIDEO": ('IMAGE if kind == "image" else VIDEO', "IMAGE"),
    "both line feeds are missing, after the role and after <|im_end|>": (
        'return [START, f"{message[\'role\']}\\n", *pieces, END, "\\n"]',
        'return [START, message["role"], *pieces, END]',
    ),
    "you put the text last; the parts must keep their order": (
        "return [START,",
        "pieces.sort(key=lambda piece: not isinstance(piece, Control))\nreturn [START,",
    ),
}


def tries(layout_turn):
    text = {"type": "text", "text": "What?"}
    image = {"type": "image"}
    video = {"type": "video"}
    messages = {
        "text": "Hello",
        "text and a picture": [text, image],
        "two pictures and a video": [image, video, image, text],
    }
    for what, content in messages.items():
        pieces = layout_turn({"role": "user", "content": content})
        yield what, [(type(p).__name__, str(p)) for p in pieces]
