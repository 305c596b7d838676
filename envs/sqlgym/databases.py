"""Declarations of the five databases: a shop, a school, a library, an airline and a hospital.

`envs.sqlgym.schema` generates their rows, seeded by the names.
"""

from envs.sqlgym.schema import Database, Table, category, day, label, number, ref

_FIRST = ("Ada", "Bruno", "Chen", "Dalia", "Emil", "Fatima", "Goran", "Hana", "Ivan", "Jana")
_LAST = ("Adler", "Baker", "Costa", "Dimitrov", "Eriksen", "Fischer", "Garcia", "Haddad", "Ito")
_CITIES = ("Oslo", "Porto", "Lyon", "Graz", "Turin", "Ghent", "Cork")

SHOP = Database(
    "shop",
    (
        Table(
            "customer",
            "customer",
            "customers",
            48,
            (
                label("name", _FIRST, _LAST),
                category("city", *_CITIES),
                number("age", 18, 80),
                day("joined", 2015, 2023),
            ),
        ),
        Table(
            "product",
            "product",
            "products",
            40,
            (
                label(
                    "title",
                    ("Blue", "Oak", "Steel", "Wool", "Glass", "Light", "Tall"),
                    ("Lamp", "Chair", "Kettle", "Scarf", "Shelf", "Clock", "Basket", "Mirror"),
                ),
                category("kind", "furniture", "kitchen", "clothing", "garden", "office"),
                number("price", 3, 240, decimals=2),
                number("stock", 0, 120),
            ),
        ),
        Table(
            "purchase",
            "purchase",
            "purchases",
            220,
            (
                ref("customer_id", "customer"),
                ref("product_id", "product"),
                number("quantity", 1, 9),
                category("payment", "card", "cash", "transfer"),
                day("bought_on", 2021, 2024),
            ),
        ),
    ),
)

SCHOOL = Database(
    "school",
    (
        Table(
            "teacher",
            "teacher",
            "teachers",
            24,
            (
                label("name", _FIRST, _LAST),
                category("department", "science", "languages", "arts", "history"),
                number("salary", 2800, 5200),
            ),
        ),
        Table(
            "course",
            "course",
            "courses",
            36,
            (
                label(
                    "title",
                    ("Basic", "Modern", "Applied", "Advanced"),
                    ("Algebra", "Biology", "Drama", "French", "Geology", "Logic", "Music"),
                    ("I", "II"),
                ),
                ref("teacher_id", "teacher"),
                number("credits", 1, 8),
                category("room", "A1", "A2", "B1", "B2", "C1"),
            ),
        ),
        Table(
            "student",
            "student",
            "students",
            60,
            (
                label("name", _FIRST, _LAST),
                category("hometown", *_CITIES),
                number("birth_year", 2001, 2008),
            ),
        ),
        Table(
            "enrolment",
            "enrolment",
            "enrolments",
            240,
            (
                ref("student_id", "student"),
                ref("course_id", "course"),
                number("grade", 1, 100),
                category("term", "autumn", "spring", "summer"),
            ),
        ),
    ),
)

LIBRARY = Database(
    "library",
    (
        Table(
            "author",
            "author",
            "authors",
            30,
            (
                label("name", _FIRST, _LAST),
                category("country", "Norway", "Portugal", "Japan", "Chile", "Kenya"),
                number("birth_year", 1880, 1990),
            ),
        ),
        Table(
            "book",
            "book",
            "books",
            60,
            (
                label(
                    "title",
                    ("The Silent", "The Last", "A Distant", "My Hidden", "The Golden"),
                    ("Harbour", "Winter", "Letter", "Garden", "Train", "Mountain", "Map"),
                    ("", "of Glass", "at Night"),
                ),
                ref("author_id", "author"),
                category("genre", "novel", "poetry", "crime", "travel", "essay"),
                number("pages", 80, 900),
                number("published", 1905, 2023),
            ),
        ),
        Table(
            "member",
            "member",
            "members",
            45,
            (
                label("name", _FIRST, _LAST),
                category("city", *_CITIES),
                category("card", "adult", "student", "child"),
            ),
        ),
        Table(
            "loan",
            "loan",
            "loans",
            260,
            (
                ref("book_id", "book"),
                ref("member_id", "member"),
                number("days_kept", 1, 60),
                day("loaned_on", 2020, 2024),
            ),
        ),
    ),
)

AIRLINE = Database(
    "airline",
    (
        Table(
            "aircraft",
            "aircraft",
            "aircraft",
            18,
            (
                label("registration", ("LN", "CS", "F", "OE", "I"), ("AAB", "CKD", "DXE", "QRT")),
                category("model", "jet", "turboprop", "wide-body"),
                number("seats", 40, 320),
                number("built", 1995, 2023),
            ),
        ),
        Table(
            "pilot",
            "pilot",
            "pilots",
            26,
            (
                label("name", _FIRST, _LAST),
                category("base", *_CITIES),
                category("rank", "captain", "first officer"),
                number("hours", 300, 15000),
            ),
        ),
        Table(
            "flight",
            "flight",
            "flights",
            150,
            (
                ref("aircraft_id", "aircraft"),
                ref("pilot_id", "pilot"),
                category("destination", "Rome", "Paris", "Athens", "Dublin", "Riga", "Malta"),
                number("distance_km", 200, 3400),
                number("delay_minutes", 0, 180),
                day("flown_on", 2022, 2024),
            ),
        ),
        Table(
            "booking",
            "booking",
            "bookings",
            300,
            (
                ref("flight_id", "flight"),
                category("class", "economy", "business", "first"),
                number("fare", 35, 900, decimals=2),
                number("bags", 0, 4),
            ),
        ),
    ),
)

HOSPITAL = Database(
    "hospital",
    (
        Table(
            "ward",
            "ward",
            "wards",
            10,
            (
                label("name", ("North", "South", "East", "West"), ("One", "Two", "Three")),
                category("specialty", "surgery", "cardiology", "paediatrics", "neurology"),
                number("beds", 8, 40),
            ),
        ),
        Table(
            "doctor",
            "doctor",
            "doctors",
            28,
            (
                label("name", _FIRST, _LAST),
                ref("ward_id", "ward"),
                number("experience_years", 1, 40),
                category("shift", "day", "night"),
            ),
        ),
        Table(
            "patient",
            "patient",
            "patients",
            60,
            (
                label("name", _FIRST, _LAST),
                number("age", 1, 95),
                category("blood_type", "0+", "A+", "B+", "AB+", "0-", "A-"),
                category("city", *_CITIES),
            ),
        ),
        Table(
            "visit",
            "visit",
            "visits",
            240,
            (
                ref("patient_id", "patient"),
                ref("doctor_id", "doctor"),
                category("reason", "check-up", "injury", "fever", "vaccination", "pain"),
                number("cost", 20, 950, decimals=2),
                number("minutes", 5, 90),
                day("visited_on", 2021, 2024),
            ),
        ),
    ),
)

DATABASES = (SHOP, SCHOOL, LIBRARY, AIRLINE, HOSPITAL)
