"""Mistakes of earlier systems that train LLM agents, and for each the tests that would notice it.

The list is of things that were seen to go wrong elsewhere, mostly without a word: a run that looks
alive and learns nothing. A test that is renamed is renamed here too: the last test sees to that.
"""

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
HERE = "bugs/test_mistakes_of_earlier_systems.py"
SCRIPTS = "scripts/test_train_scripts.py"

MISTAKES: dict[str, tuple[str, dict[str, tuple[str, ...]]]] = {
    "B1": (
        "the dataset's reader changed and its caller did not: no run starts any more",
        {
            "data/test_tasks.py": ("test_openmanus_parquet_is_read_as_it_is",),
            SCRIPTS: ("test_two_servers_are_started_trained_on_and_gone",),
        },
    ),
    "B2": (
        "the environments' base class lost what the agent asks it for",
        {
            "agentgym/test_embedded_oracles.py": ("test_the_oracle_wins_over_http",),
            SCRIPTS: ("test_two_servers_are_started_trained_on_and_gone",),
        },
    ),
    "B3": (
        "the reward is read where the environment never puts it, so every token's reward is 0, and "
        "whitening makes advantages of the noise that is left",
        {
            "agentgym/test_client_replays.py": (
                "test_textcraft_plays_the_recorded_game_to_its_reward",
            ),
            "rollout/test_episode.py": (
                "test_what_is_trained_is_token_for_token_what_was_sampled",
            ),
            "rollout/test_batch.py": (
                "test_token_rewards_add_up_to_the_episodes_reward_on_agent_tokens",
            ),
            "algorithms/test_advantages.py": ("test_whiten_does_not_blow_up_float_noise",),
        },
    ),
    "B4": (
        "the task that is played is the row's place in the batch, not the row's item",
        {
            "rollout/test_episode.py": ("test_the_item_of_the_row_is_the_item_that_is_played",),
            "data/test_mixture.py": ("test_every_row_of_a_source_comes_once_an_epoch",),
        },
    ),
    "B5": (
        "groups of one member, or of copies of one episode: a group baseline without a group",
        {
            "rollout/test_episode.py": (
                "test_a_group_is_one_item_and_its_members_differ_in_their_uid",
            ),
            "training/test_experience.py": (
                "test_episodes_that_lost_their_siblings_are_left_out_and_groups_without_signal_too",
            ),
            "training/test_training.py": ("test_mistakes_are_found_before_anything_is_written",),
        },
    ),
    "B6": (
        "a reward function can be chosen, and nothing calls it",
        {
            "rollout/test_scoring_and_metrics.py": (
                "test_a_function_sees_the_episode_and_its_ground_truth",
            ),
            "rewards/test_reward_registry.py": ("test_an_unknown_name_lists_the_names",),
            "docs/test_docs_examples.py": (
                "test_the_extension_guide_runs_from_its_first_line_to_its_last",
            ),
        },
    ),
    "B7": (
        "PPO has a KL coefficient and no reference to take the KL to",
        {
            HERE: ("test_ppo_has_a_reference_and_its_kl_coefficient_is_the_one_that_was_set",),
            "training/test_experience.py": (
                "test_kl_in_the_reward_lowers_it_by_the_coefficient_times_the_difference",
            ),
        },
    ),
    "B8": (
        "lambda is set by one name and read by another",
        {HERE: ("test_lam_is_read_by_the_name_it_is_set_by",)},
    ),
    "B9": (
        "validation is configured and never runs",
        {
            HERE: ("test_val_only_validates_and_trains_nothing",),
            "evaluation/test_evaluation.py": ("test_validation_in_training_is_the_same_code",),
        },
    ),
    "B10": (
        "prompt, parser and environment speak of three forms of answer; what does not parse is "
        "sent as an empty action and counted as valid",
        {
            "rollout/test_action_formats.py": ("test_the_form_in_the_instruction_is_parsed",),
            "rollout/test_episode.py": (
                "test_an_invalid_action_is_answered_counted_and_never_sent",
            ),
            "rollout/test_scoring_and_metrics.py": ("test_metrics_by_hand",),
        },
    ),
    "B11": (
        "reordering a batch leaves its per-row values, group ids among them, where they were",
        {
            "test_data_proto.py": (
                "test_reorder_keeps_values_in_step_and_the_inverse_restores",
                "test_unpad_finds_padding_rows_after_a_reorder",
            ),
        },
    ),
    "B12": (
        "the KL penalty is written through a mask taken for indexes: two rows are changed",
        {"algorithms/test_kl.py": ("test_kl_in_reward_touches_every_agent_token_and_no_other",)},
    ),
    "B13": (
        "a discounted reward adds up to the reward times the number of turns",
        {
            "algorithms/test_reward_allocation.py": (
                "test_discounted_at_gamma_one_is_not_multiplied_by_the_number_of_turns",
                "test_rewards_sum_to_the_episodes_and_sit_on_agent_tokens",
            ),
        },
    ),
    "B14": (
        "parameters and moments in bfloat16, in which a small step rounds to none",
        {
            HERE: (
                "test_parameters_and_moments_are_float32_and_take_the_smallest_step_though_"
                "products_are_not",
            ),
        },
    ),
    "B15": (
        "only a window at the end of the conversation is trained, and rewards before it are lost",
        {
            "rollout/test_batch.py": (
                "test_a_batch_holds_every_turn_whatever_its_length",
                "test_a_segment_longer_than_a_row_is_an_error_and_loses_no_reward_silently",
            ),
        },
    ),
    "B16": (
        "log-probs are taken of other labels than the tokens that were sampled",
        {
            "engines/test_jax_engine.py": ("test_log_probs_of_whole_episodes_are_the_learners",),
            "models/test_log_probs.py": ("test_values_and_gradients_equal_the_naive_ones",),
        },
    ),
    "B17": (
        "prompt tokens are trained as if the agent had said them",
        {
            "rollout/test_episode.py": (
                "test_the_prompt_and_the_observations_are_given_and_the_text_matches_the_log",
            ),
            "data/test_chat.py": (
                "test_real_conversations_train_on_what_the_agent_said_and_nothing_else",
            ),
        },
    ),
    "B18": (
        "advantages run through observation tokens; the critic's mask is another one, and shifted",
        {
            "algorithms/test_advantages.py": ("test_inserting_observation_tokens_changes_nothing",),
            "training/test_experience.py": ("test_observation_tokens_move_no_advantage",),
            "models/test_transformer.py": ("test_a_value_is_of_the_state_before_its_token",),
        },
    ),
    "B19": (
        "text is decoded and encoded again: other ids are trained than were sampled, and no end",
        {
            "rollout/test_episode.py": (
                "test_what_is_trained_is_token_for_token_what_was_sampled",
                "test_every_turn_is_trained_with_its_end_and_the_text_is_what_the_tokens_say",
            ),
        },
    ),
    "B20": (
        "batches are padded with copies of real rows, which are trained on twice",
        {
            "test_data_proto.py": (
                "test_padding_adds_zero_rows_of_weight_zero_and_unpad_removes_them",
            ),
            "algorithms/test_aggregation.py": (
                "test_rows_of_weight_zero_and_padding_do_not_count",
            ),
        },
    ),
    "B21": (
        "the warm-up takes nearly the whole run; sampling from a cut distribution is trained as if "
        "it were the whole one",
        {
            HERE: (
                "test_the_defaults_warm_up_for_no_part_of_the_run_and_sample_from_the_whole_"
                "distribution",
            ),
            "learner/test_update.py": ("test_schedules_by_hand",),
            "engines/test_jax_engine_sampling.py": (
                "test_draws_follow_the_distribution_and_log_probs_are_its",
            ),
        },
    ),
    "B22": (
        "epochs, shuffling and schedules are settings that nothing reads; micro-batches of unequal "
        "size weigh the same; a metric is of the last micro-batch alone",
        {
            HERE: (
                "test_every_epoch_takes_every_group_once_in_another_order_and_metrics_are_of_all_"
                "updates",
            ),
            "learner/test_update.py": (
                "test_schedules_by_hand",
                "test_every_micro_batching_gives_the_same_parameters",
            ),
            "configs/test_configs.py": (
                "test_every_binding_is_read_and_of_its_type_from_any_directory",
            ),
        },
    ),
    "B23": (
        "padding of one turn's answer stands inside the prompt of the next",
        {
            "rollout/test_episode.py": (
                "test_what_is_trained_is_token_for_token_what_was_sampled",
                "test_a_turn_that_is_cut_goes_on_behind_an_end_that_is_not_trained",
            ),
        },
    ),
    "B24": (
        "the model is shown an observation without a chat template and never told how to answer",
        {
            "rollout/test_rollout_prompts.py": (
                "test_every_environment_is_told_its_game_and_the_form_that_will_be_parsed",
            ),
            "rollout/test_episode.py": (
                "test_a_tokenizer_without_chat_template_is_refused_at_once",
            ),
        },
    ),
    "B25": (
        "episodes generate one at a time, on every device the same",
        {
            "rollout/test_runner.py": (
                "test_the_engine_gets_the_requests_of_all_episodes_at_once",
            ),
        },
    ),
    "B26": (
        "two episodes share one environment session and reset each other",
        {
            "rollout/test_runner.py": (
                "test_two_episodes_never_share_a_session_and_none_is_left_behind",
            ),
            "agentgym/test_pool.py": ("test_no_id_is_ever_leased_twice_at_once_under_64_threads",),
        },
    ),
    "B27": (
        "threads call the generating workers in an order that differs between them",
        {
            "engines/test_jax_engine.py": (
                "test_a_request_gives_the_same_bits_alone_and_among_others",
            ),
            "rollout/test_runner.py": (
                "test_what_an_episode_samples_does_not_depend_on_the_others",
            ),
        },
    ),
    "B28": (
        "an episode that died of its infrastructure is a zero, and enters its group's statistics",
        {
            "rollout/test_episode_failures.py": (
                "test_an_environment_that_dies_in_mid_episode_is_played_again_on_a_fresh_one",
                "test_an_environment_that_keeps_dying_fails_the_episode_and_gives_no_reward",
            ),
            "algorithms/test_recipes.py": ("test_advantages_do_not_see_failed_episodes",),
            "rollout/test_scoring_and_metrics.py": (
                "test_failures_and_episodes_without_turns_divide_by_nothing",
            ),
        },
    ),
    "B29": (
        "a dead server is skipped without a word; limits of length are ignored, and one that is "
        "met exactly breaks the batch",
        {
            "agentgym/test_open_environments.py": (
                "test_all_servers_that_cannot_be_used_are_named_at_once",
            ),
            "rollout/test_episode.py": (
                "test_an_observation_longer_than_its_limit_is_cut_in_the_middle",
                "test_a_prompt_that_leaves_room_for_exactly_one_turn_is_played",
            ),
            "rollout/test_batch.py": ("test_a_row_may_be_exactly_as_long_as_its_segment",),
        },
    ),
    "B30": (
        "masks are read off the padding's id, which may be the end of turn's",
        {HERE: ("test_a_padding_id_that_is_the_end_of_turn_hides_no_token",)},
    ),
    "B31": (
        "sessions are never closed, until the server is full",
        {
            "agentgym/test_pool.py": (
                "test_a_lease_is_a_session_that_is_closed_at_the_end",
                "test_thousands_of_leases_leave_nothing_behind",
            ),
            "envs/test_env_server.py": (
                "test_sessions_nobody_uses_expire_and_their_games_are_closed",
            ),
        },
    ),
    "B32": (
        "validation rows are training rows; misspelt names of environments; a batch that is larger "
        "than the dataset",
        {
            HERE: ("test_validation_rows_that_are_also_training_rows_are_not_trained_on",),
            "data/test_mixture.py": (
                "test_a_batch_larger_than_the_dataset_runs_on_into_the_next_epochs",
            ),
        },
    ),
    "B33": (
        "launch scripts that start nothing, leave servers behind, call 0.0.0.0, and return another "
        "program's exit code",
        {
            SCRIPTS: (
                "test_two_servers_are_started_trained_on_and_gone",
                "test_whatever_the_trainer_returns_is_returned",
                "test_a_signal_reaches_the_trainer_and_ends_the_servers",
                "test_the_scripts_are_clean",
            ),
            "agentgym/test_client_faults.py": ("test_addresses_as_people_write_them",),
        },
    ),
    "B34": (
        "checkpoints hold weights alone, so that nothing resumes; one step fewer than asked for",
        {
            "training/test_training.py": (
                "test_a_run_that_is_killed_again_and_again_ends_to_the_bit_where_an_untouched_one_"
                "does",
            ),
            "training/test_checkpoints.py": (
                "test_a_checkpoint_cut_short_by_a_kill_is_never_taken_for_a_whole_one",
            ),
        },
    ),
    "B35": (
        "normalising an answer deletes its spaces; tests that import what is gone",
        {
            "rewards/test_reward_functions.py": (
                "test_normalizing_an_action_keeps_its_words_apart",
                "test_exact_match_compares_the_last_answer_normalized",
            ),
        },
    ),
    "B36": (
        "a score is written under one name and read under another; more devices are asked for than "
        "there are",
        {
            "rollout/test_batch.py": ("test_a_score_replaces_the_environments_reward",),
            "learner/test_update.py": ("test_meshes_and_batches_that_do_not_fit_say_so",),
        },
    ),
}


def test_the_list_is_whole():
    assert [*MISTAKES] == [f"B{number}" for number in range(1, 37)]


@pytest.mark.parametrize("number", MISTAKES)
def test_a_test_would_notice_the_mistake(number):
    description, covering = MISTAKES[number]
    assert description and covering
    for path, names in covering.items():
        source = (TESTS / path).read_text()
        for name in names:
            assert re.search(rf"^def {name}\(", source, re.MULTILINE), f"{path}::{name} is gone"
