"""Costs of real compiled modules and of single instructions, against hand calculation."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from manus_jax.planning.convolutions import product_flops
from manus_jax.planning.hlo_text import Shape, parse
from manus_jax.planning.module_costs import by_kind, module_costs, splash_flops
from manus_jax.planning.replica_groups import first_group

pytestmark = pytest.mark.slow


def text_of(function, *shapes):
    return jax.jit(function).lower(*shapes).compile().as_text()


def floats(*shape, sharding=None):
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)


def line_mesh(count):
    return jax.make_mesh(
        (count,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:count]
    )


def one_computation(*lines):
    """A module of one computation with these instructions, and its last instruction."""
    module = parse("\n".join(("ENTRY %main (a: f32[]) -> f32[] {", *lines, "}")))
    computation = module.computations["main"]
    return computation, computation.instructions[computation.root]


def test_a_product_in_a_scan_counts_once_per_step():
    def layers(x, weights):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0]

    costs = module_costs(text_of(layers, floats(8, 16), floats(5, 16, 16)), (), 1)
    assert costs.flops == 5 * 2 * 8 * 16 * 16
    assert costs.collectives == ()


def test_loops_whose_length_is_data_take_the_lengths_given_by_depth():
    def loops(x, w, outer, inner):
        step = lambda _, x: jnp.tanh(x @ w)
        return jax.lax.fori_loop(
            0, outer, lambda _, x: jax.lax.fori_loop(0, inner, step, jnp.sin(x @ w)), x
        )

    number = jax.ShapeDtypeStruct((), jnp.int32)
    text = text_of(loops, floats(8, 16), floats(16, 16), number, number)
    costs = module_costs(text, (3, 7), 1)
    assert costs.flops == (3 + 3 * 7) * 2 * 8 * 16 * 16


def test_a_loop_that_takes_two_steps_at_a_time_runs_half_as_often():
    text = """
%body (p: (f32[4,4], s32[])) -> (f32[4,4], s32[]) {
  %p = (f32[4,4]{1,0}, s32[]) parameter(0)
  %x = f32[4,4]{1,0} get-tuple-element(%p), index=0
  %i = s32[] get-tuple-element(%p), index=1
  %two = s32[] constant(2)
  %next = s32[] add(%i, %two)
  %y = f32[4,4]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %out = (f32[4,4]{1,0}, s32[]) tuple(%y, %next)
}

%condition (p: (f32[4,4], s32[])) -> pred[] {
  %p = (f32[4,4]{1,0}, s32[]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=1
  %bound = s32[] constant(9)
  ROOT %less = pred[] compare(%i, %bound), direction=LT
}

ENTRY %main (x: f32[4,4]) -> (f32[4,4], s32[]) {
  %x = f32[4,4]{1,0} parameter(0)
  %one = s32[] constant(1)
  %start = s32[] copy(%one)
  %in = (f32[4,4]{1,0}, s32[]) tuple(%x, %start)
  ROOT %loop = (f32[4,4]{1,0}, s32[]) while(%in), condition=%condition, body=%body
}
"""
    # At 1, 3, 5 and 7.
    assert module_costs(text, (), 1).flops == 4 * 2 * 4 * 4 * 4


def test_collectives_have_their_bytes_their_devices_and_their_loops():
    mesh = line_mesh(4)

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False)
    def exchange(x):
        def step(x, _):
            return jnp.sin(jax.lax.all_gather(x, "x", tiled=True).reshape(4, -1).sum(0)), None

        x, _ = jax.lax.scan(step, x, None, length=6)
        return jnp.sin(jax.lax.psum(x, "x"))

    text = text_of(exchange, floats(400, sharding=NamedSharding(mesh, P("x"))))
    costs = module_costs(text, (), 4)
    gather, reduce = sorted(costs.collectives, key=lambda c: c.kind)
    # 100 floats a device; a ring sends 3 parts of a gather and 2 * 3/4 of a sum.
    assert (gather.kind, gather.group, gather.loops) == ("all-gather", (0, 1, 2, 3), (6,))
    assert gather.wire_bytes == 6 * 3 * 400
    assert (reduce.kind, reduce.loops, reduce.wire_bytes) == ("all-reduce", (), 600)
    assert by_kind(costs.collectives) == {"all-gather": (6, 7200.0), "all-reduce": (1, 600.0)}


def test_a_scan_reads_a_slice_of_its_stacked_operand_each_step_not_the_whole():
    def total(x, stacked):
        return jax.lax.scan(lambda x, w: (jnp.sin(x + w), None), x, stacked)[0]

    short, long = (
        module_costs(text_of(total, floats(1000), floats(n, 1000)), (), 1).bytes for n in (10, 40)
    )
    # Each step reads x and a row and writes x: three rows of 4,000 bytes, give or take a copy.
    assert short == pytest.approx(10 * 12_000, rel=0.4)
    assert long / short == pytest.approx(4, rel=0.1)


def test_arrays_in_the_chips_own_memory_cause_no_traffic():
    far = "  %a = f32[100]{0} parameter(0)"
    near = "  %a = f32[100]{0:T(128)S(1)} parameter(0)"
    for line, moved in ((far, 400 + 400), (near, 400)):
        text = f"ENTRY %main (a: f32[100]) -> f32[100] {{\n{line}\n"
        text += "  ROOT %b = f32[100]{0} negate(%a)\n}"
        assert module_costs(text, (), 1).bytes == moved


def test_a_slice_that_is_fetched_ahead_counts_by_itself():
    text = """
ENTRY %main (a: f32[100]) -> f32[10] {
  %a = f32[100]{0} parameter(0)
  %s = (f32[100]{0}, f32[10]{0:S(1)}, s32[]{:S(2)}) slice-start(%a), slice={[0:10]}
  ROOT %d = f32[10]{0:S(1)} slice-done(%s)
}
"""
    assert module_costs(text, (), 1).bytes == 40


@pytest.mark.parametrize(
    ("left", "right", "out", "window", "labels", "flops"),
    [
        # [512, 256] x [256, 64]: 2 * 512 * 256 * 64.
        ("512,256", "256,64", "512,64", "", "bf_io->bf", 2 * 512 * 256 * 64),
        # The same for two rows, the row as a spatial dimension of size 1.
        ("2,512,256", "64,256,1", "2,512,64", "size=1", "0bf_oi0->0bf", 2 * 2 * 512 * 256 * 64),
        # The weights as the input and two rows as a reversed window, with padding around: of the
        # two places of the window, each output row has one that is not padding.
        (
            "64,256,1",
            "2,512,256",
            "2,512,64",
            "size=2 pad=1_1 rhs_reversal=1",
            "bf0_0oi->0fb",
            2 * 2 * 512 * 256 * 64,
        ),
    ],
)
def test_products_written_as_convolutions(left, right, out, window, labels, flops):
    computation, convolution = one_computation(
        f"  %a = bf16[{left}]{{1,0}} parameter(0)",
        f"  %b = bf16[{right}]{{1,0}} parameter(1)",
        f"  ROOT %c = bf16[{out}]{{1,0}} convolution(%a, %b), window={{{window}}}, "
        f"dim_labels={labels}",
    )
    assert product_flops(convolution, computation) == flops


def test_a_convolution_counts_no_product_with_padding():
    # A window of 3 over 5 numbers padded by one on each side: 3 * 5 - 2 products that are real.
    computation, convolution = one_computation(
        "  %a = f32[1,5,1]{2,1,0} parameter(0)",
        "  %b = f32[3,1,1]{2,1,0} parameter(1)",
        "  ROOT %c = f32[1,5,1]{2,1,0} convolution(%a, %b), window={size=3 pad=1_1}, "
        "dim_labels=b0f_0io->b0f",
    )
    assert product_flops(convolution, computation) == 2 * 13


def test_splash_counts_the_blocks_under_the_diagonal():
    computation, kernel = one_computation(
        "  %m = s8[1,2,2]{2,1,0} parameter(0)",
        "  %q = bf16[3,4,256,64]{3,2,1,0} parameter(1)",
        "  %k = bf16[3,2,256,64]{3,2,1,0} parameter(2)",
        "  ROOT %splash_mha_fwd.1 = bf16[3,4,256,64]{3,2,1,0} custom-call(%m, %q, %k), "
        'custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={',
        '"xprof_metadata":"{\\"block_q\\": 128}"',
        "}}",
    )
    # Two products; of 2 x 2 blocks of 128 x 128 scores, 3 are computed, for 3 rows and 4 heads.
    assert splash_flops(kernel, computation) == 2 * 3 * 4 * 3 * 2 * 128 * 128 * 64


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
    costs = module_costs(text, (), 4)
    assert by_kind(costs.collectives) == {
        "all-gather": (1, 20 * 3.0),
        "reduce-scatter": (1, 80 * 3 / 4),
    }


def test_what_hosts_carry_between_slices_counts_once():
    text = """
ENTRY %main (a: bf16[40]) -> token[] {
  %a = bf16[40]{0} parameter(0)
  %t = token[] after-all()
  %s = (bf16[40]{0}, u32[], token[]) send(%a, %t), attributes={name="xla_megascale_runtime"}
  ROOT %d = token[] send-done(%s)
}
"""
    (sent,) = module_costs(text, (), 8).collectives
    assert (sent.kind, sent.group, sent.wire_bytes) == ("between slices", (0, 7), 80)


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
        ("replica_groups={}", (0, 1, 2, 3, 4, 5, 6, 7)),
        ("source_target_pairs={{0,1},{1,0}}", (0, 1)),
    ],
)
def test_groups_in_each_way_that_xla_writes_them(written, group):
    _, instruction = one_computation(
        "  %a = f32[4]{0} parameter(0)", f"  ROOT %b = f32[4]{{0}} all-reduce(%a), {written}, x=1"
    )
    assert sorted(first_group(instruction, 8)) == sorted(group)


def test_shapes_know_their_bytes_and_where_they_lie():
    _, copy = one_computation(
        "  %a = (bf16[3,4]{1,0:T(8,128)(2,1)S(1)}, pred[5]{0}, /*index=2*/s32[]) parameter(0)",
        "  ROOT %b = f32[2]{0} custom-call(%a)",
    )
    module = parse(
        "ENTRY %e (a: f32[]) -> f32[] {\n  ROOT %a = (bf16[3,4]{1,0:S(1)}, pred[5]) parameter(0)\n}"
    )
    (a,) = module.computations["e"].instructions.values()
    assert a.shapes == (Shape("bf16", (3, 4), 1), Shape("pred", (5,)))
    assert a.bytes == 24 + 5
    assert copy.bytes == 8


def test_computations_of_other_threads_and_metadata_over_several_lines_are_read():
    module = parse(
        """
%aside (p: f32[2]) -> f32[2] {
  ROOT %p = f32[2]{0} parameter(0)
}, execution_thread="sparsecore"

ENTRY %main (a: f32[2]) -> f32[2] {
  %a = f32[2]{0} parameter(0)
  %k = f32[2]{0} custom-call(%a), frontend_attributes={kernel_metadata={
"block": 1
}}, metadata={op_name="k"}
  ROOT %b = f32[2]{0} negate(%k)
}
"""
    )
    assert set(module.computations) == {"aside", "main"}
    main = module.computations["main"]
    assert [i.opcode for i in main.instructions.values()] == ["parameter", "custom-call", "negate"]
    assert 'op_name="k"' in main.instructions["k"].attributes


def test_text_without_a_module_is_refused():
    with pytest.raises(ValueError, match="no ENTRY"):
        parse("not a module")
