"""The reference pages agree with the code: settings, functions, recipes, keys."""

import dataclasses
import importlib
import inspect
import re
from pathlib import Path

import pytest

from manus_jax.agentgym.rewards import RewardKind
from manus_jax.algorithms import aggregation, corrections, kl, recipes, reward_allocation
from manus_jax.config import settings
from manus_jax.models.families import FAMILIES
from manus_jax.rollout.strategies import STRATEGIES

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
ALGORITHMS = (DOCS / "algorithms.md").read_text()
COMING = (DOCS / "coming_from_openmanus_rl.md").read_text()
GROUPS = {v.gin_name: v for v in vars(settings).values() if hasattr(v, "gin_name")}
BINDINGS = {f"{name}.{f.name}" for name, cls in GROUPS.items() for f in dataclasses.fields(cls)}

MODEL = "actor_rollout_ref.model."
ACTOR = "actor_rollout_ref.actor."
REF = "actor_rollout_ref.ref."
ROLLOUT = "actor_rollout_ref.rollout."
HYDRA_KEYS = {
    "data.": """tokenizer train_files val_files train_data_num val_data_num prompt_key
        max_prompt_length max_response_length max_start_length max_obs_length train_batch_size
        val_batch_size return_raw_input_ids return_raw_chat shuffle_train_dataloader env_name
        env_server_base env_ports env_data_len react_format rollout_strategy max_workers truncation
        filter_overlong_prompts reward_fn_key custom_cls apply_chat_template_kwargs""",
    MODEL: """path external_lib override_config enable_gradient_checkpointing use_remove_padding
        torch_dtype lora_rank lora_alpha target_modules use_liger use_fused_kernels
        enable_activation_offload""",
    ACTOR: """strategy ppo_mini_batch_size ppo_micro_batch_size use_dynamic_bsz
        ppo_max_token_len_per_gpu grad_clip state_masking clip_ratio clip_ratio_low clip_ratio_high
        clip_ratio_c loss_agg_mode policy_loss.loss_mode entropy_coeff use_kl_loss kl_loss_coef
        kl_loss_type use_invalid_action_penalty invalid_action_penalty_coef ppo_epochs shuffle
        ulysses_sequence_parallel_size optim.lr optim.lr_warmup_steps_ratio optim.lr_warmup_steps
        optim.min_lr_ratio optim.warmup_style optim.num_cycles optim.weight_decay
        fsdp_config.param_offload fsdp_config.grad_offload fsdp_config.optimizer_offload
        fsdp_config.wrap_policy.min_num_params fsdp_config.fsdp_size checkpoint.contents""",
    REF: """fsdp_config.param_offload log_prob_micro_batch_size log_prob_use_dynamic_bsz
        log_prob_max_token_len_per_gpu ulysses_sequence_parallel_size""",
    ROLLOUT: """name mode temperature top_k top_p prompt_length response_length dtype
        gpu_memory_utilization ignore_eos enforce_eager free_cache_engine load_format
        tensor_model_parallel_size max_num_batched_tokens max_num_seqs max_model_len
        enable_chunked_prefill log_prob_micro_batch_size do_sample n n_agent val_kwargs
        multi_turn""",
    "critic.": """strategy optim.lr optim.lr_warmup_steps_ratio model.path model.tokenizer_path
        model.enable_gradient_checkpointing model.use_remove_padding
        model.fsdp_config.param_offload model.fsdp_config.grad_offload
        model.fsdp_config.optimizer_offload ppo_mini_batch_size ppo_micro_batch_size
        forward_micro_batch_size ppo_max_token_len_per_gpu ppo_epochs shuffle grad_clip
        cliprange_value""",
    "": """reward_model.enable reward_model.strategy reward_model.model.input_tokenizer
        reward_model.model.path reward_model.micro_batch_size reward_model.max_length
        reward_model.reward_manager custom_reward_function.path custom_reward_function.name
        retriever.url retriever.topk do_search max_turns""",
    "algorithm.": """gamma lam adv_estimator reward_score_fn no_think_rl kl_penalty kl_ctrl.type
        kl_ctrl.kl_coef kl_ctrl.horizon kl_ctrl.target_kl use_kl_in_reward
        reward_components.goal_reward reward_components.length_penalty
        reward_components.format_reward reward_allocation state_masking.start_state_marker
        state_masking.end_state_marker norm_adv_by_std_in_grpo use_pf_ppo pf_ppo
        gigpo.step_advantage_w gigpo.mode gigpo.enable_similarity gigpo.similarity_thresh
        filter_groups.enable filter_groups.max_num_gen_batches""",
    "trainer.": """total_epochs total_training_steps project_name experiment_name logger nnodes
        n_gpus_per_node save_freq test_freq critic_warmup default_hdfs_dir default_local_dir
        val_before_train val_only balance_batch log_val_generations rollout_data_dir
        validation_data_dir resume_mode resume_from_path max_actor_ckpt_to_keep
        max_critic_ckpt_to_keep device""",
    "env.": """env_name seed max_steps history_length rollout.n webshop search use_summary
        summary_api_key summary_endpoint summary_model summary_concurrency""",
}


def rows_of(text, heading):
    """The cells of the rows of the first table after a heading."""
    part = text.partition(f"\n## {heading}\n")[2].partition("\n\n| ")[2].partition("\n\n")[0]
    return [[cell.strip() for cell in row.strip("| ").split(" | ")] for row in part.splitlines()]


def key_rows():
    keys = COMING.partition("\n## Keys\n")[2].partition("\n## Data\n")[0]
    rows = [line.strip("|").split("|") for line in keys.splitlines() if line.startswith("| ")]
    return {r[0].strip(): (r[1].strip(), r[2].strip()) for r in rows if r[0].strip() != "Hydra key"}


def test_every_hydra_key_has_a_row_and_no_row_is_of_a_key_that_is_not():
    wanted = {f"{prefix}{key}" for prefix, keys in HYDRA_KEYS.items() for key in keys.split()}
    assert set(key_rows()) == wanted


def test_every_key_of_ours_that_is_named_exists():
    for hydra, (binding, note) in key_rows().items():
        if binding == "—":
            assert note.startswith(("not needed", "not supported")), f"{hydra} says no reason"
        else:
            assert re.fullmatch(r"`\w+\.\w+`", binding), hydra
    named = {
        found
        for page in DOCS.glob("*.md")
        for found in re.findall(rf"`((?:{'|'.join(GROUPS)})\.\w+)", page.read_text())
    }
    ours = {
        n for n in named if n not in {f"{p}{k}" for p, ks in HYDRA_KEYS.items() for k in ks.split()}
    }
    assert len(ours) > 40
    assert not sorted(ours - BINDINGS - {"status.json"})  # a file
    assert {b.strip("`") for b, _ in key_rows().values() if b != "—"} <= BINDINGS


def resolved(name):
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            value = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for part in parts[cut:]:
            value = getattr(value, part)
        return value
    raise AttributeError(name)


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`(manus_jax(?:\.\w+)+)`", ALGORITHMS))))
def test_every_function_that_is_named_exists(name):
    assert resolved(name) is not None


def test_every_recipe_is_on_the_page_as_it_is():
    names = {correction: name for name, correction in corrections.CORRECTIONS.items()}
    defaults = {f.name: f.default for f in dataclasses.fields(recipes.Recipe)}
    shown = {row[0]: row[1:] for row in rows_of(ALGORITHMS, "Recipes")[2:]}
    assert [*shown] == [*recipes.RECIPES]
    for name, recipe in recipes.RECIPES.items():
        dual = f"{recipe.dual_clip:g}" if recipe.dual_clip else "off"
        placed = f"{recipe.kl_placement}, {recipe.kl_estimator}, {recipe.kl_coef:g}"
        told = [
            recipe.advantage,
            recipe.loss,
            f"{recipe.clip_low:g}, {recipe.clip_high:g}",
            dual,
            recipe.aggregation,
            ", ".join(names[c] for c in recipe.corrections),
            placed if recipe.kl_placement != "none" else "none",
        ]
        peculiar = ", ".join(
            f"{field} = {getattr(recipe, field)}"
            for field in ("gamma", "lam", "normalize_by_std", "step_weight", "whiten",
                          "entropy_coef", "dynamic_sampling")
            if getattr(recipe, field) != defaults[field]
        )  # fmt: skip
        assert shown[name] == [*told, *([peculiar] if peculiar else [])], name


def test_every_part_has_its_formula():
    for known in (
        recipes.ADVANTAGES,
        recipes.POLICY_LOSSES,
        reward_allocation.ALLOCATIONS,
        aggregation.AGGREGATIONS,
        corrections.CORRECTIONS,
    ):
        for name in known:
            assert f"\n| {name} | " in ALGORITHMS, name
    for name in kl.ESTIMATORS:
        assert re.search(rf"\n\| (\S+ \| )?{re.escape(name)} \| ", ALGORITHMS), name
    for name, correction in corrections.CORRECTIONS.items():
        row = f"| {correction.level} | {correction.action} | {correction.low:g} |"
        assert f"\n| {name} {row} {correction.high:g} |" in ALGORITHMS


def test_the_tables_of_models_lora_and_strategies_name_what_there_is():
    models, lora, strategies = (
        re.findall(r"^\| (.+) \|$", (DOCS / page).read_text(), re.MULTILINE)
        for page in ("models.md", "lora.md", "strategies.md")
    )
    assert {row.split("`")[1] for row in models if row.count("`") == 2} - {"model_type"} == {
        *FAMILIES
    }
    bindings = [f"lora.{field.name}" for field in dataclasses.fields(settings.LoraSettings)]
    assert [row.split("`")[1] for row in lora if row.startswith("`lora.")] == bindings
    shown = {
        row.split("`")[1]: row.rpartition(" | ")[2] for row in strategies[1 : 1 + len(STRATEGIES)]
    }
    assert {*shown} == {*STRATEGIES}
    for name, parameters in shown.items():
        own = {*inspect.signature(STRATEGIES[name]).parameters} - {"spec", "rollout"}
        assert set(re.findall(r"`(\w+)`", parameters)) == own, name


def test_the_guide_names_the_meanings_that_a_reward_can_have():
    guide = (DOCS / "extending.md").read_text()
    [item] = [text for text in guide.split("\n- ") if "`RewardRule`" in text]
    assert set(re.findall(r"`([A-Z_]{4,})`", item)) == set(RewardKind.__members__)


def test_the_index_names_every_page_and_nothing_else():
    index = (DOCS / "README.md").read_text()
    pages = {p.name for p in DOCS.glob("*.md")} - {"README.md"}
    assert set(re.findall(r"\]\((\w+\.md)\)", index)) == pages
    setups = {p.name for p in (DOCS / "setups").glob("*.md")} - {"README.md"}
    index = (DOCS / "setups" / "README.md").read_text()
    assert set(re.findall(r"\]\((\w+\.md)\)", index)) == setups
