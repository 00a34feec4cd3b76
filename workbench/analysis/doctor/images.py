"""Checks of images, of which SQL has the raw bytes.

A query gets few rows with whole images into its memory, so what is asked of every image is asked of
its hash and of a few of its bytes.
"""

from __future__ import annotations

from stepwell._sql import literal, quoted
from stepwell.spaces import Space
from workbench.analysis.doctor.check import Check, Subject, images, size_of

RUN = 48
"""Bytes that are read of an image: whole pixels of one, two, three or four channels."""
RARE = 0.1
"""Share of the trajectories up to which images of one colour are a defect, not a scene."""
COLOURS = 64
"""Colours with which images are compared; fewer for large images."""
MOST_BYTES = 1 << 22
"""Maximum number of bytes of the images of these colours."""
SCALED = 10
"""Images of an episode that have only bytes of 0 and 1, from which on it is no fading."""
ELSEWHERE = 0.02
"""Share of the images of other episodes below which such images are a defect."""


def _dark_image(s: Subject) -> str | None:
    if not images(s):
        return None
    bright = " or ".join(f"not {_dark(f'obs.{quoted(key)}')}" for key, _ in images(s))
    return f"""select null as id, 'bytes of 0 and 1' as what from {s.steps}
where t = 0 having count(*) > 0 and not bool_or({bright})"""


def _large(s: Subject) -> list[tuple[str, Space]]:
    return [(key, space) for key, space in images(s) if size_of(space) >= RUN]


def _channels(space: Space) -> int:
    """Bytes of a pixel; of images with their channels first only grey ones have one colour."""
    return space.shape[-1] if len(space.shape) > 2 and space.shape[-1] <= 4 else 1


def _flat(s: Subject) -> str | None:
    """Common tables: for each key, l0, l1 … (id, t, hash h of an image, p, some bytes of it, and
    dark: it has bytes of 0 and 1 only), and f0, f1 …, the hashes of images of one colour. A query
    that reads images twice, or more than one piece of each, needs too much memory."""
    tables = []
    for i, (key, space) in enumerate(_large(s)):
        size, channels = size_of(space), _channels(space)
        first = size // 2 // RUN * RUN
        image = f"obs.{quoted(key)}"
        some = f"{image}[{first + 1}:{first + RUN}]"
        tables.append(f"""l{i} as materialized (
  select trajectory_id as id, t, hash({image}) as h, {some} as p,
    case when {_dark(some)} then {_dark(image)} else false end as dark from {s.steps}),
f{i} as (
  select hash(repeat(pixel, {size // channels})) as h from (
    select p[1:{channels}] as pixel from l{i} where p = repeat(p[1:{channels}], {RUN // channels})
    group by pixel order by count(*) desc limit {max(1, min(COLOURS, MOST_BYTES // size))}))""")
    return ",\n".join(tables)


def _flat_image(s: Subject) -> str | None:
    if not _large(s):
        return None
    found = " union all ".join(
        f"select id, t, {literal(key)} as name from l{i} where h in (select h from f{i})"
        for i, (key, _) in enumerate(_large(s))
    )
    return f"""with {_flat(s)},
w as ({found})
select id, arg_min(name, t) || ', ' || count(*) || ' from step ' || min(t) as what from w
where (select count(distinct id) from w)
  <= greatest(1, {RARE} * (select count(distinct id) from l0)) group by id"""


def _dark(image: str) -> str:
    return f"regexp_full_match(hex({image}), '(0[01])+')"


def _scaled_image(s: Subject) -> str | None:
    if not _large(s):
        return None
    parts = [
        f"""select id, {literal(key)} as name, first from (
  select id, dark, first, sum(dark) filter (dark < {SCALED}) over () as others,
    sum(n) filter (dark < {SCALED}) over () as n
  from (select id, count(*) as n, count(*) filter (dark) as dark, min(t) filter (dark) as first
    from (select id, t, dark and h not in (select h from f{i}) as dark from l{i}) group by id))
where dark >= {SCALED} and others < {ELSEWHERE} * n"""
        for i, (key, _) in enumerate(_large(s))
    ]
    return f"""with {_flat(s)}
select id, first(name) || ' from step ' || min(first) as what from (
{" union all ".join(parts)}) group by id"""


CHECKS = (
    Check("dark_image", "warning", "images have {what}: were they scaled to 0 … 1 before?",
          _dark_image, "multiply by 255 where the data is made, and import it again"),
    Check("flat_image", "warning", "{n} with images of one colour, which are rare here ({what})",
          _flat_image),
    Check("scaled_image", "warning", "{n} with images of bytes 0 and 1, elsewhere there are others "
          "({what}): were they scaled to 0 … 1 before?", _scaled_image),
)  # fmt: skip
