"""Collectives of real compiled modules and of written ones, against hand calculation."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from manus_jax.planning.collectives import find_collectives, first_group


def by_kind(collectives):
    out = {}
    for c in collectives:
        count, sent = out.get(c.kind, (0, 0.0))
        out[c.kind] = count + c.count, sent + c.sent * c.count
    return out


def four_devices():
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    numbers = jax.ShapeDtypeStruct((400,), jnp.float32, sharding=NamedSharding(mesh, P("x")))
    shard = functools.partial(
        jax.shard_map, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False
    )
    return numbers, shard


def gathered(x):
    return jnp.sin(jax.lax.all_gather(x, "x", tiled=True).reshape(4, -1).sum(0))


def test_collectives_have_their_bytes_their_devices_and_their_loops():
    numbers, shard = four_devices()

    @shard
    def exchange(x):
        x, _ = jax.lax.scan(lambda x, _: (gathered(x), None), x, None, length=6)
        return jnp.sin(jax.lax.psum(x, "x"))

    text = jax.jit(exchange).lower(numbers).compile().as_text()
    gather, reduce = sorted(find_collectives(text, (), 4), key=lambda c: c.kind)
    # 100 floats a device; a ring sends 3 parts of a gather and 2 * 3/4 of a sum.
    assert (gather.kind, gather.group, gather.loops) == ("all-gather", (0, 1, 2, 3), (6,))
    assert (gather.sent, gather.count) == (3 * 400, 6)
    assert (reduce.kind, reduce.loops, reduce.sent) == ("all-reduce", (), 600)


def test_loops_whose_length_is_data_take_the_lengths_given_by_depth():
    numbers, shard = four_devices()

    def exchange(x, outer, inner):
        def body(_, x):
            return jax.lax.fori_loop(0, inner, lambda _, x: gathered(x), jax.lax.psum(x, "x"))

        return shard(lambda x: jax.lax.fori_loop(0, outer, body, x))(x)

    number = jax.ShapeDtypeStruct((), jnp.int32)
    text = jax.jit(exchange).lower(numbers, number, number).compile().as_text()
    assert by_kind(find_collectives(text, (3, 7), 4)) == {
        "all-reduce": (3, 3 * 600.0),
        "all-gather": (3 * 7, 3 * 7 * 1200.0),
    }


@pytest.mark.parametrize(("step", "runs"), [(1, 9), (2, 5)])
def test_a_loop_without_a_note_takes_its_bound_and_the_step_of_its_counter(step, runs):
    text = """
%body (p: (f32[4], s32[])) -> (f32[4], s32[]) {
  %p = (f32[4]{0:T(128)}, s32[]) parameter(0)
  %x = f32[4]{0} get-tuple-element(%p), index=0
  %i = s32[] get-tuple-element(%p), index=1
  %step = s32[]{:T(128)} constant(STEP)
  %next = s32[]{:T(128)} add(%i, %step)
  %y = f32[4]{0} all-reduce(%x), replica_groups={{0,1}}, to_apply=%add
  ROOT %out = (f32[4]{0}, s32[]) tuple(%y, /*index=1*/%next)
}

%condition (p: (f32[4], s32[])) -> pred[] {
  %p = (f32[4]{0}, s32[]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=1
  %bound = s32[]{:T(128)} constant(9)
  ROOT %less = pred[] compare(%i, %bound), direction=LT
}

ENTRY %main (x: f32[4]) -> (f32[4], s32[]) {
  %x = f32[4]{0} parameter(0)
  ROOT %loop = (f32[4]{0:T(128)}, s32[]) while(%x), condition=%condition, body=%body
}
"""
    for counter in ("s32", "u32"):
        written = text.replace("STEP", str(step)).replace("s32", counter)
        (reduce,) = find_collectives(written, (2,), 2)
        assert (reduce.loops, reduce.sent) == ((runs,), 16)


def test_steps_of_a_collective_that_is_spread_over_fusions_count_as_one():
    text = """
%part.1 (p: bf16[10]) -> bf16[40] {
  %p = bf16[10]{0} parameter(0)
  ROOT %g = bf16[40]{0} all-gather(%p), replica_groups={{0,1,2,3}}, attributes={chain_id="5"}
}

%part.2 (p: bf16[10]) -> bf16[40] {
  %p = bf16[10]{0} parameter(0)
  ROOT %g = bf16[40]{0} all-gather(%p), replica_groups={{0,1,2,3}}, attributes={chain_id="5"}
}

%all-reduce-scatter.3 (p: bf16[40]) -> bf16[10] {
  %p = bf16[40]{0} parameter(0)
  %r = bf16[40]{0} all-reduce(%p), channel_id=8, replica_groups={{0,1,2,3}}, to_apply=%add
  ROOT %s = bf16[10]{0} slice(%r), slice={[0:10]}
}

ENTRY %main (a: bf16[10]) -> bf16[10] {
  %a = bf16[10]{0} parameter(0)
  %one = bf16[40]{0} fusion(%a), kind=kCustom, calls=%part.1
  %two = bf16[40]{0} fusion(%a), kind=kCustom, calls=%part.2
  ROOT %three = bf16[10]{0} fusion(%two), kind=kCustom, calls=%all-reduce-scatter.3
}
"""
    assert by_kind(find_collectives(text, (), 4)) == {
        "all-gather": (1, 20 * 3.0),
        "reduce-scatter": (1, 80 * 3 / 4),
    }


@pytest.mark.parametrize(
    ("line", "kind", "sent"),
    [
        # Operands come before results in what starts a collective.
        ("(bf16[10]{0}, bf16[40]{0}) all-gather-start(%a)", "all-gather", 20 * 3),
        ("(f32[8]{0}, f32[2]{0}) all-reduce-start(%a, %b)", "all-reduce", 40 * 1.5),
        ("f32[10]{0} reduce-scatter(%a)", "reduce-scatter", 40 * 3),
        ("(f32[8]{0}, f32[8]{0}) all-to-all(%a, %b)", "all-to-all", 64 * 3 / 4),
        (
            "(pred[9]{0}, pred[9]{0:S(1)}, u32[]{:S(2)}, u32[]) collective-permute-start(%a)",
            "collective-permute",
            9,
        ),
    ],
)
def test_bytes_follow_from_the_shape_of_the_result(line, kind, sent):
    text = f"ENTRY %main (a: f32[]) -> f32[] {{\n  ROOT %c = {line}, replica_groups=[1,4]<=[4]\n}}"
    assert by_kind(find_collectives(text, (), 4)) == {kind: (1, sent)}


def test_traffic_between_slices_counts_once():
    text = """
ENTRY %main (a: bf16[40]) -> token[] {
  %a = bf16[40]{0} parameter(0)
  %t = token[] after-all()
  %s = (bf16[40]{0}, u32[], token[]) send(%a, %t), attributes={name="xla_megascale_runtime"}
  ROOT %d = token[] send-done(%s)
}
"""
    (sent,) = find_collectives(text, (), 8)
    assert (sent.kind, sent.sent) == ("between slices", 80)


@pytest.mark.parametrize(
    ("written", "group"),
    [
        ("replica_groups={{0,2},{1,3}}", (0, 2)),
        ("replica_groups=[2,4]<=[8]", (0, 1, 2, 3)),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", (0, 4)),
        ("replica_groups=mesh['a'=2,'b'=4] {'a'}", (0, 4)),
        ("replica_groups=mesh['a'=2,'b'=4] {'b'}", (0, 1, 2, 3)),
        ("replica_groups=mesh['a'=2,'b'=4] {'b':(1)2}", (0, 2)),
        ("replica_groups=mesh['a'=2,'b'=2,'c'=2] {'a','c'}", (0, 1, 4, 5)),
        # Two machines with four devices each; the mesh has them side by side.
        ("replica_groups=mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'a'}", (0, 1, 2, 3)),
        ("replica_groups=mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'b'}", (0, 4)),
        ("replica_groups=mesh['a'=4,'b'=2], device_ids=([8]) {'b'}", (0, 1)),
        ("replica_groups={}", (0, 1, 2, 3, 4, 5, 6, 7)),
        ("source_target_pairs={{0,1},{1,0}}", (0, 1)),
    ],
)
def test_groups_in_each_way_that_xla_writes_them(written, group):
    assert sorted(first_group(f"  ROOT %b = f32[4] all-reduce(%a), {written}, x=1", 8)) == sorted(
        group
    )


def test_text_without_a_module_is_refused():
    with pytest.raises(ValueError, match="no ENTRY"):
        find_collectives("not a module", (), 1)
