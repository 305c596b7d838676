"""What the agent is told before the first observation, for every environment, as data.

The one idea: a prompt has four parts (what the game is, what actions there are, an example, the
form of an answer), and only the last depends on the parser, which brings it (`rollout.actions`).
Environments that take a parsed action may be answered in any form; those whose server parses the
model's text (`EnvironmentRow.sends_text`) in their own alone.
"""

from dataclasses import dataclass

REACT = """\
Give one thought and one action in every answer, in this form:

Thought:
why you do what you do next

Action:
the action"""

SQL_BLOCK = """\
Give one thought and one query in your answer, in this form:

Thought:
how the query finds the answer

Action:
```sql
SELECT ...
```"""

TOOL_CALL = """\
Give one thought of at most three sentences and one tool call in every answer, with the input as \
JSON and the call on the last line, in this form:

Thought: why you make this call

Action: NAME with Action Input: {"parameter": "value"}"""

SEARCH_TAGS = """\
Think first, between <think> and </think>. Then either ask for passages with <search>words to look \
for</search> and stop, or give the answer with <answer>a few words</answer>. What a search finds \
comes back between <information> and </information>."""

FENCED = """\
Think step by step about what to do next. End with exactly one action between triple backticks, \
with every parameter in square brackets, for example ```click [42]```"""


@dataclass(frozen=True)
class Example:
    """One turn as it might go."""

    observation: str
    thought: str
    action: str


@dataclass(frozen=True)
class EnvironmentPrompt:
    """The parts of the first turn of one environment."""

    instruction: str
    actions: tuple[str, ...]
    examples: tuple[Example, ...]


_FINISH = "finish(answer): end the task with its answer: a text, a number or a list"
_VALID = "check_valid_actions(): names the tools there are"
_DATES = "latitude, longitude, start_date, end_date"
_TODAY = "latitude, longitude, current_date"

PROMPTS: dict[str, EnvironmentPrompt] = {
    "textcraft": EnvironmentPrompt(
        "You craft an item in a world like Minecraft. The first observation lists crafting "
        "commands and names the goal; it is reached when you hold the goal item. Not every command "
        "is needed. Where a command asks for a kind of thing, such as planks, any special kind of "
        "it will do, such as oak planks: write the special name.",
        (
            "get [count] [item]: take something that no command crafts",
            "craft [count] [item] using [count] [ingredient], [count] [ingredient]: use a listed "
            "command with the counts it gives",
            "inventory: see what you have",
        ),
        (
            Example(
                "Crafting commands:\ncraft 4 oak planks using 1 oak logs\n"
                "craft 4 stick using 2 planks\n\nGoal: craft stick.",
                "Sticks need 2 planks, oak planks are planks, and they need oak logs. Logs have no "
                "command of their own, so I take one.",
                "get 1 oak logs",
            ),
        ),
    ),
    "babyai": EnvironmentPrompt(
        "You are in rooms with keys, balls, boxes and doors, and have a goal to reach in few "
        "steps. An observation names what you see, how many steps ahead and to the side it is, "
        "what you carry, and the actions that are possible now. Things are numbered, such as "
        "red ball 1. A locked door opens with a key of its colour that you carry.",
        (
            "turn left, turn right, move forward: one step",
            "go to [thing] [number]: walk up to it",
            "pickup [thing] [number]: walk up to it and take it",
            "go through [door] [number]: through an open door",
            "toggle and go through [door] [number]: open a closed or locked door and go through",
            "toggle: open the door or box in front of you",
            "drop: put down what you carry",
            "check available actions: list what is possible now",
        ),
        (
            Example(
                "Your goal: pick up the red ball\nThere is a red ball 1 2 steps in front of you.",
                "The red ball is in sight, so I can take it at once.",
                "pickup red ball 1",
            ),
        ),
    ),
    "sciworld": EnvironmentPrompt(
        "You carry out a science task in a house with a kitchen, a workshop, a greenhouse and more "
        "rooms, connected by doors. The score grows with every part of the task that is done. "
        "Focus only on what the task tells you to focus on: a wrong focus ends it with a loss. "
        "Name things as the observations name them. When you are asked which of several things "
        "you mean, answer with its number alone.",
        (
            "look around, look at [thing], look in [container], inventory, task",
            "open [thing], close [thing], activate [thing], deactivate [thing]",
            "go to [room]: to a room next to this one, through an open door",
            "pick up [thing], put down [thing], move [thing] to [place]",
            "pour [thing] in [container], dunk [container] in [liquid], mix [container]",
            "use [thing] on [thing], connect [thing] to [thing], disconnect [thing]",
            "read [thing], eat [thing], flush [thing], focus on [thing]",
            "wait: let ten steps pass; wait1: let one step pass",
        ),
        (
            Example(
                "Your task is to boil water. This room is called the hallway. You also see:\n"
                "\tA door to the kitchen (that is closed)",
                "There is water and a stove in the kitchen, and its door is closed.",
                "open door to kitchen",
            ),
        ),
    ),
    "alfworld": EnvironmentPrompt(
        "You do a household task in rooms full of furniture and things, all numbered, such as "
        "mug 1 and cabinet 3. Find what the task is about, change it as the task says (clean it in "
        "a sink, heat it in a microwave, cool it in a fridge, look at it under a lamp), and put it "
        "where it belongs. You can hold one thing. The observation may list the actions that are "
        "possible now; what is not possible has no effect.",
        (
            "go to [furniture]",
            "open [furniture], close [furniture]",
            "take [thing] from [furniture], move [thing] to [furniture]",
            "clean [thing] with [furniture], heat [thing] with [furniture], "
            "cool [thing] with [furniture]",
            "use [lamp], examine [thing], inventory, look",
        ),
        (
            Example(
                "You are in the middle of a room. You see a fridge 1, a microwave 1, a sinkbasin 1."
                "\nYour task is to: put a hot apple in fridge.",
                "Apples are often kept in the fridge, so I look there first.",
                "go to fridge 1",
            ),
        ),
    ),
    "maze": EnvironmentPrompt(
        "You walk through a maze to a goal, in as few moves as you can and at most 50. An "
        "observation tells where the goal is, where you are, and on which sides of you there are "
        "walls. A position is a row and a column: moving down adds 1 to the first number, moving "
        "right adds 1 to the second. A move into a wall leaves you where you are, and the way may "
        "first lead away from the goal.",
        ("move up", "move down", "move left", "move right"),
        (
            Example(
                "The goal is at position 8, 6. Your current position is at position 6, 6. There "
                "are walls to your right, to your left.",
                "The goal is two rows below me and there is no wall below me.",
                "move down",
            ),
        ),
    ),
    "wordle": EnvironmentPrompt(
        "You play Wordle: find a hidden word of five letters with at most six guesses. Every guess "
        "is answered letter by letter: g means right letter and place, y means the letter is "
        "elsewhere in the word, b means it is not in the word. A guess the game does not know as a "
        'word is answered with "invalid word" and costs a try.',
        ("five letters with spaces between them, such as: s h i r e",),
        (
            Example(
                "b b y b b",
                "My guess s h i r e tells me that there is an i, but not in the third place, and "
                "no s, h, r or e. The word pilot fits.",
                "p i l o t",
            ),
        ),
    ),
    "sqlgym": EnvironmentPrompt(
        "You answer a question with one SQL query on a SQLite database. The observation describes "
        "the tables and asks the question. You have a single try; the rows your query returns are "
        "compared with the right ones, so select the columns in the order in which the question "
        "names them.",
        ("one SQL query",),
        (
            Example(
                "shop contains tables such as item. Table item has columns such as id, name, "
                "price. id is the primary key.\n\nHow many items are there?",
                "Counting the rows of item answers the question.",
                "```sql\nSELECT COUNT(*) FROM item\n```",
            ),
        ),
    ),
    "webshop": EnvironmentPrompt(
        "You shop on a website. The observation gives the buyer's wish and the page you are on: "
        "text, and the buttons in brackets. Find a product with all the properties that are asked "
        "for and below the price limit, choose its options, and buy it. Buying ends the task; the "
        "reward is the share of the wish that the product and its options meet.",
        (
            "search[words]: on a page with a search bar",
            "click[text]: on something that can be clicked on this page, such as click[next >], "
            "click[back to search], click[B09XYZ1234], click[large], click[buy now]",
        ),
        (
            Example(
                "WebShop [SEP] Instruction: [SEP] I want a red cotton shirt in size large, price "
                "lower than 30 dollars [SEP] Search",
                "I search for the words that describe the product best.",
                "search[red cotton shirt large]",
            ),
        ),
    ),
    "webarena": EnvironmentPrompt(
        "You use a web browser to reach an objective. You are shown the page as a tree of elements "
        "with numbers, its address, the open tabs and your last action. Choose actions that are "
        "possible on this page, one at a time, and stop when the objective is reached or cannot "
        "be.",
        (
            "click [id], hover [id]",
            "type [id] [text] [1]: type into a field and press Enter; [0] does not press Enter",
            "press [keys]: such as press [Ctrl+v]",
            "scroll [down] or scroll [up]",
            "new_tab, tab_focus [number], close_tab",
            "goto [url], go_back, go_forward",
            "stop [answer]: end with the answer, nothing if none was asked for, N/A if the task "
            "cannot be done",
        ),
        (
            Example(
                "[164] textbox 'Search' focused: True\nOBJECTIVE: find a restaurant near the zoo",
                "The search field has the number 164.",
                "```type [164] [restaurants near the zoo] [1]```",
            ),
        ),
    ),
    "searchqa": EnvironmentPrompt(
        "You answer a question of knowledge. You may look for passages as often as you need before "
        "you answer; a wrong answer may be tried again.",
        ("<search>words to look for</search>", "<answer>a few words</answer>"),
        (
            Example(
                "Question: In which city was the director of Jaws born?",
                "Jaws was directed by Steven Spielberg; I check where he was born.",
                "<search>Steven Spielberg birthplace</search>",
            ),
        ),
    ),
    "weather": EnvironmentPrompt(
        "You answer questions on the weather with tools. Never invent coordinates: ask "
        "get_latitude_longitude for those of a place. Dates are written YYYY-MM-DD. Call finish "
        "with the answer when you have it.",
        (
            "get_user_current_date(), get_user_current_location()",
            "get_latitude_longitude(name): of a city",
            f"get_historical_temp, get_historical_rain, get_historical_snow({_DATES}): past days",
            f"get_temp_forecast, get_rain_forecast, get_snow_forecast({_DATES}): coming days",
            f"get_current_temp, get_current_rain, get_current_snow({_TODAY})",
            f"get_historical_air_quality_index({_DATES})",
            f"get_current_air_quality_index({_TODAY})",
            "get_air_quality_level(air_quality_index): from good to extremely poor",
            "get_elevation(latitude, longitude)",
            "get_distance(latitude1, longitude1, latitude2, longitude2): in kilometres",
            _VALID,
            _FINISH,
        ),
        (
            Example(
                "You should perform actions to accomplish the goal: How warm was it here yesterday?"
                "\nGive me one action.",
                "I need today's date to know which day was yesterday.",
                "get_user_current_date with Action Input: {}",
            ),
        ),
    ),
    "movie": EnvironmentPrompt(
        "You answer questions on movies and the people who made them with the tools of a movie "
        "database. Never invent an id: ask get_search_movie or get_search_person for it. Call "
        "finish with the answer when you have it.",
        (
            "get_search_movie(movie_name), get_search_person(person_name): with the id",
            "get_movie_details(movie_id): budget, genres, revenue, vote_average, release_date",
            "get_movie_production_companies, get_movie_production_countries(movie_id)",
            "get_movie_cast, get_movie_crew, get_movie_keywords(movie_id)",
            "get_movie_alternative_titles, get_movie_translation(movie_id)",
            "get_person_details(person_id): biography, birthday, place_of_birth",
            "get_person_cast, get_person_crew, get_person_external_ids(person_id)",
            _VALID,
            _FINISH,
        ),
        (
            Example(
                "You should perform actions to accomplish the goal: When was Alien released?\n"
                "Give me one action.",
                "I need the id of the movie first.",
                'get_search_movie with Action Input: {"movie_name": "Alien"}',
            ),
        ),
    ),
    "academia": EnvironmentPrompt(
        "You answer questions on papers and their authors with two graphs: in PaperNet papers cite "
        "papers, in AuthorNet authors are linked by the papers they wrote together. Load a graph "
        "before you use it. Call finish with the answer when you have it.",
        (
            "loadPaperNet(), loadAuthorNet()",
            "neighbourCheck(graph, node): the neighbours of a node in PaperNet or AuthorNet",
            "paperNodeCheck(node): authors, year, venue, citations, keywords of a paper",
            "authorNodeCheck(node): name and organization of an author",
            "authorEdgeCheck(node1, node2): the papers that two authors wrote together",
            _FINISH,
        ),
        (
            Example(
                "You should perform actions to accomplish the goal: Who wrote Attention Is All You "
                "Need?\nGive me one action.",
                "The question is about a paper, so I load the graph of papers.",
                "loadPaperNet with Action Input: {}",
            ),
        ),
    ),
    "todo": EnvironmentPrompt(
        "You look after somebody's to-do list with tools: answer a question on it or change it as "
        'asked. Never invent an id: ask get_projects or get_tasks for it. Call finish with "done" '
        "when the change is made, or with the answer.",
        (
            "get_user_current_date(), get_user_current_location()",
            "get_projects()",
            "update_project(project_id, is_favorite)",
            "get_tasks(project_id)",
            "get_task_description, get_task_duration, complete_task, delete_task(task_id)",
            "update_task(task_id, due_date)",
            _VALID,
            _FINISH,
        ),
        (
            Example(
                "You should perform actions to accomplish the goal: Is water the plants a task of "
                "the Home project?\nGive me one action.",
                "I need the id of the Home project to see its tasks.",
                "get_projects with Action Input: {}",
            ),
        ),
    ),
    "sheet": EnvironmentPrompt(
        "You change a spreadsheet as asked, with tools. Open the sheet that the goal names, then "
        "look at all its values before you change it. Cells are written in A1 notation; rows and "
        "columns count from 1. Freeze the first row before you sort. Call finish when the sheet is "
        "as it should be.",
        (
            "open_sheet(name), del_sheet(name)",
            "get_all_values(), get_range_values(start_position, end_position)",
            "get_cell_value(position), get_note(position), get_A1_annotation(row, col)",
            "filter_cells(query, in_row, in_column): the cells that match",
            "update_cell(position, value), update_note(position, content)",
            "update_range(start_position, end_position, values_list)",
            "insert_rows(values_list, row_idx), insert_cols(values_list, col_idx)",
            "delete_batch_data(dimension, index_list): of dimension row or col",
            "get_value_by_formula(start_position, end_position, position_list, operator)",
            "update_cell_by_formula(start_position, end_position, position_list, result_position, "
            "operator): operator is SUM, AVERAGE, COUNT, MAX, MIN, MINUS or PRODUCT, over a range "
            "or a list of positions",
            "sort_sheet_by_col(col_num, order): order is asc or des",
            "merge_cells(start_position, end_position), freeze_data(dimension, num)",
            "finish(): end the task",
        ),
        (
            Example(
                "You should perform actions to accomplish the goal: In Sheet1, add up column B.\n"
                "Give me one action.",
                "The sheet must be open before I can use it.",
                'open_sheet with Action Input: {"name": "Sheet1"}',
            ),
        ),
    ),
}
