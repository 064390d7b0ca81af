# SPDX-License-Identifier: Apache-2.0
"""Every setting changes a run as its sentence says: for each, the test that shows its effect at another value.

A test is named `file::function`; files of tests have unique names. A setting without a line here fails the walk, and so
does a line whose test is not there or whose file never mentions the setting.
"""

import ast
from dataclasses import fields
from functools import cache

import pytest

from megatron.settings.schema import GROUPS

MODEL = "test_model_settings"
PLAIN = f"{MODEL}::test_a_network_is_the_plain_one"  # logits, loss and shapes of a transformer written down plainly
EXPERTS = "test_expert_layouts::test_any_layout_is_the_plain_loop"
ROUTER = "test_router"
QUANTIZED = "test_quantization::test_any_layout_is_the_plain_loop"
SPARSE = "test_sparsity::test_any_layout_is_the_plain_loop"
ROPE = "test_rope_scaling::test_frequencies_and_stretch"
DATA, STEP, RUN = "test_data_settings", "test_step_settings", "test_run_settings"
RATE = f"{STEP}::test_learning_rates_are_the_closed_forms"
UPDATE = f"{STEP}::test_updates_are_those_of_torchs_adamw"
RULES = "test_optimizers"
MUON = f"{RULES}::test_muon_is_its_description"
ROUNDED = "test_formats::test_updates_are_the_explicit_arithmetic"
IN_BF16 = "test_formats::test_a_reduction_is_the_sum_in_bf16"
WHERE = f"{STEP}::test_state_on_the_host_or_in_files_changes_nothing_else"
ARITHMETIC, LAYOUT, FUSIONS = "test_arithmetic_settings", "test_layout_settings", "test_fusion_settings"
SCALE = f"{ARITHMETIC}::test_loss_scales_of_fp16"
FORMAT = f"{ARITHMETIC}::test_formats"
AGAIN = f"{ARITHMETIC}::test_what_is_computed_again"
CUT = "test_stages::test_layers_of_stages"  # the counts of layers that Megatron-LM's rules give
CLUSTER = f"{LAYOUT}::test_what_is_planned_for"
GUARDED = "test_guarded_runs"

CHECKS = dict(
    model=dict(
        num_layers=PLAIN,
        hidden_size=PLAIN,
        num_attention_heads=PLAIN,
        seq_length=f"{MODEL}::test_seq_length_is_that_of_the_samples",
        max_position_embeddings=PLAIN,
        ffn_hidden_size=PLAIN,
        kv_channels=PLAIN,
        group_query_attention=f"{MODEL}::test_groups_need_a_number",
        num_query_groups=PLAIN,
        position_embedding_type=PLAIN,
        rotary_base=PLAIN,
        rotary_percent=PLAIN,
        rope_local_base_freq=PLAIN,
        rotary_seq_len_interpolation_factor=ROPE,
        use_rope_scaling=ROPE,
        rope_scaling_factor=ROPE,
        rope_scaling_low_freq_factor=ROPE,
        rope_scaling_high_freq_factor=ROPE,
        rope_scaling_original_max_position_embeddings=ROPE,
        rope_type=ROPE,
        rotary_scaling_factor=ROPE,
        yarn_original_max_position_embeddings=ROPE,
        yarn_beta_fast=ROPE,
        yarn_beta_slow=ROPE,
        yarn_correction_range_round_to_int=ROPE,
        mscale=ROPE,
        mscale_all_dim=ROPE,
        normalization=PLAIN,
        norm_epsilon=PLAIN,
        norm_position=PLAIN,
        qk_layernorm=PLAIN,
        qk_layernorm_across_heads=PLAIN,
        swiglu=PLAIN,
        geglu=PLAIN,
        squared_relu=PLAIN,
        quick_geglu=PLAIN,
        activation_func_clamp_value=PLAIN,
        glu_linear_offset=PLAIN,
        num_experts=EXPERTS,
        moe_layer_freq=EXPERTS,
        moe_ffn_hidden_size=EXPERTS,
        moe_shared_expert_intermediate_size=EXPERTS,
        moe_shared_expert_gate=EXPERTS,
        moe_router_topk=EXPERTS,
        moe_router_score_function=EXPERTS,
        moe_router_pre_softmax=EXPERTS,
        moe_router_topk_scaling_factor=EXPERTS,
        moe_router_load_balancing_type=EXPERTS,
        moe_aux_loss_coeff=EXPERTS,
        moe_z_loss_coeff=EXPERTS,
        moe_router_enable_expert_bias=EXPERTS,
        moe_router_bias_update_rate=EXPERTS,
        moe_expert_capacity_factor=EXPERTS,
        moe_pad_expert_input_to_capacity=EXPERTS,
        moe_token_drop_policy=EXPERTS,
        moe_router_num_groups=f"{ROUTER}::test_choices_and_weights_are_those_of_megatron_core",
        moe_router_group_topk=f"{ROUTER}::test_choices_and_weights_are_those_of_megatron_core",
        moe_router_dtype=f"{ROUTER}::test_logits_are_fp32_whatever_the_format",
        moe_input_jitter_eps=f"{ROUTER}::test_jitter_is_drawn_by_sample_and_only_in_training",
        moe_router_force_load_balancing=f"{ROUTER}::test_forced_balance_chooses_by_numbers_and_keeps_the_gradient",
        bias_gelu_fusion=PLAIN,
        disable_bias_linear=PLAIN,
        add_qkv_bias=PLAIN,
        linear="test_linear_kinds::test_any_layout_is_the_plain_loop",
        kd_hidden_projections="test_distillation::test_narrow_states_are_projected_to_those_of_the_teacher",
        quantization=QUANTIZED,
        weight_quantize_type=QUANTIZED,
        activation_quantize_type="test_quantization::test_weights_alone",
        activation_preprocess_type=QUANTIZED,
        weight_bits=QUANTIZED,
        activation_bits=QUANTIZED,
        quantization_layers="test_quantization::test_what_cannot_be_is_said",
        quantization_skip=QUANTIZED,
        sparsity=SPARSE,
        initial_sparsity=SPARSE,
        sparsity_begin_step=SPARSE,
        sparsity_end_step=SPARSE,
        sparsity_frequency=SPARSE,
        sparsity_layers="test_sparsity::test_what_cannot_be_is_said",
        sparsity_skip=SPARSE,
        lora_rank="test_lora::test_any_layout_is_the_plain_loop",
        lora_alpha="test_lora::test_any_layout_is_the_plain_loop",
        lora_target="test_lora::test_any_layout_is_the_plain_loop",
        lora_dropout="test_lora::test_products_against_autograd",
        lora_split_fused="test_lora::test_pairs_of_queries_keys_and_values_apart",
        use_rslora="test_peft::test_our_adapters_in_peft",
        use_dora="test_peft::test_our_adapters_in_peft",
        scale_embedding=PLAIN,
        query_pre_attn_scalar=PLAIN,
        untie_embeddings_and_output_weights=PLAIN,
        apply_query_key_layer_scaling=f"{MODEL}::test_query_key_layer_scaling_keeps_scores_in_the_range_of_fp16",
        attention_softmax_in_fp32=f"{MODEL}::test_softmax_in_fp32_is_that_of_the_rounded_scores",
        window_size=PLAIN,
        window_attn_skip_freq=PLAIN,
        attn_logit_softcapping=PLAIN,
        softmax_type=PLAIN,
        final_logit_softcapping=PLAIN,
        hidden_dropout=f"{MODEL}::test_hidden_dropout_is_at_its_three_sites",
        attention_dropout=f"{MODEL}::test_attention_dropout_drops_attention_weights",
        label_smoothing=f"{MODEL}::test_label_smoothing_is_torchs_in_training_alone",
        z_loss_coeff=f"{MODEL}::test_z_loss_is_added_to_the_loss",
        init_method_std=f"{MODEL}::test_initial_weights_have_their_standard_deviation",
        make_vocab_size_divisible_by=PLAIN,
        model_type=f"{MODEL}::test_a_script_trains_its_own_model_type",
        model_name_or_path=f"{MODEL}::test_a_named_shape_has_the_published_sizes",
    ),
    parallel=dict(
        tensor_model_parallel_size=f"{LAYOUT}::test_tensor_parallel_ranks_hold_a_half_of_each_matrix",
        pipeline_model_parallel_size=f"{LAYOUT}::test_pipeline_ranks_hold_their_layers",
        context_parallel_size=f"{LAYOUT}::test_context_parallel_ranks_hold_two_chunks_of_the_sequence",
        cp_comm_type=f"{LAYOUT}::test_cp_comm_type_is_what_ranks_send_in_each_layer",
        hierarchical_context_parallel_sizes=f"{LAYOUT}::test_hierarchical_context_parallel_sizes_are_those_of_two_levels",
        expert_model_parallel_size="test_own_experts::test_ranks_hold_their_part_of_the_experts",
        expert_tensor_parallel_size="test_own_experts::test_ranks_hold_their_part_of_the_experts",
        overlap_moe_expert_parallel_comm="test_overlap::test_turns_hide_the_exchanges_of_experts",
        data_parallel_size=f"{LAYOUT}::test_data_parallel_size_is_asserted",
        dp_degree="test_dp_degree::test_world_is_the_product_of_paddles_degrees",
        sequence_parallel=f"{LAYOUT}::test_sequence_parallel_ranks_hold_a_half_of_the_sequence",
        pipeline_schedule=f"{LAYOUT}::test_pipeline_schedule_is_the_order_of_passes",
        num_layers_per_virtual_pipeline_stage=CUT,
        num_virtual_stages_per_pipeline_rank=CUT,
        pipeline_stage_layers=CUT,
        decoder_first_pipeline_num_layers=CUT,
        decoder_last_pipeline_num_layers=CUT,
        account_for_embedding_in_pipeline_split=CUT,
        account_for_loss_in_pipeline_split=CUT,
        pipeline_timeline=f"{LAYOUT}::test_a_timeline_is_written_where_it_is_wanted",
        sharding_stage="test_zero_stages::test_bytes_of_each_stage",
        sharding_degree=f"{LAYOUT}::test_sharding_degree_is_the_ranks_that_share_the_state",
        overlap_grad_reduce="test_zero_stages::test_reductions_of_kept_gradients_overlap_the_last_backward_pass",
        overlap_param_gather="test_zero_stages::test_stage_1_gathers_all_units_ahead_and_waits_at_their_use",
        print_topology=f"{LAYOUT}::test_print_topology_prints_the_groups_and_stops",
        distributed_backend=f"{LAYOUT}::test_backend_and_timeout_of_the_process_group",
        distributed_timeout_minutes=f"{LAYOUT}::test_a_search_joins_with_the_same_timeout",
    ),
    tokenizer=dict(
        tokenizer_type=f"{DATA}::test_tokenizer_type_says_what_a_file_is",
        vocab_file=f"{DATA}::test_a_vocabulary_and_its_merges_are_files",
        merge_file=f"{DATA}::test_a_vocabulary_and_its_merges_are_files",
        tokenizer_model=f"{DATA}::test_tiktoken_splits_by_its_pattern",
        vocab_size=f"{DATA}::test_vocabulary_is_as_large_as_said",
        vocab_extra_ids="test_special_tokens::test_sentinels_stand_behind_the_vocabulary",
        tiktoken_pattern=f"{DATA}::test_tiktoken_splits_by_its_pattern",
    ),
    data=dict(
        data_path=f"{DATA}::test_data_path_mixes_by_weight",
        train_data_path=f"{DATA}::test_each_split_has_its_own_path",
        valid_data_path=f"{DATA}::test_each_split_has_its_own_path",
        test_data_path=f"{DATA}::test_each_split_has_its_own_path",
        split=f"{DATA}::test_split_divides_the_documents_in_order",
        data_cache_path=f"{DATA}::test_index_maps_lie_where_they_are_wanted",
        verify_data=f"{DATA}::test_verify_data_reads_every_byte_first",
        mock_data=f"{DATA}::test_mock_data_needs_no_files_and_is_the_same_each_time",
        full_validation="test_validation::test_a_whole_set_is_each_sample_once_in_any_layout",
        dataset_type="test_document_dataset::test_an_epoch_is_each_document_once",
        dataloader_type=f"{DATA}::test_cyclic_shuffles_each_epoch_anew",
        collate_fn="test_own_collate::test_a_flag_names_the_function",
        num_workers=f"{DATA}::test_workers_prepare_batches_in_threads",
        reset_position_ids=f"{DATA}::test_positions_alone_start_again",
        reset_attention_mask=f"{DATA}::test_documents_are_alone",
        eod_mask_loss=f"{DATA}::test_ends_of_documents_have_no_loss",
    ),
    batch=dict(
        micro_batch_size=f"{STEP}::test_micro_batches_of_a_step",
        global_batch_size=f"{STEP}::test_micro_batches_of_a_step",
        local_batch_size=f"{STEP}::test_micro_batches_of_a_step",
        gradient_accumulation_steps=f"{STEP}::test_micro_batches_of_a_step",
        rampup_batch_size=f"{STEP}::test_the_batch_grows_as_its_ramp_says",
        train_iters=f"{STEP}::test_length_of_training",
        train_samples=f"{STEP}::test_length_of_training",
        train_epochs="test_epochs::test_a_run_of_epochs",
        eval_interval=f"{STEP}::test_evaluations",
        eval_iters=f"{STEP}::test_evaluations",
        test_iters=f"{STEP}::test_test_data_have_a_number_of_batches_of_their_own",
        eval_epoch="test_epochs::test_validation_behind_every_second_epoch",
        eval_requests="test_requests::test_requests_in_the_loop_are_those_of_the_plain_network",
        eval_same_samples="test_validation::test_the_same_samples_each_time",
        stop_at_loss="test_validation::test_a_loss_that_is_reached_ends_training",
        skip_train="test_skip_train::test_the_last_evaluation_of_training_in_another_layout",
        exit_interval=f"{STEP}::test_a_run_stops_early_with_a_checkpoint",
        exit_duration_in_mins=f"{STEP}::test_a_run_stops_early_with_a_checkpoint",
    ),
    optimizer=dict(
        optimizer=f"{RULES}::test_sgd_is_torchs",
        lr=UPDATE,
        freeze="test_frozen::test_any_layout_is_the_plain_loop",
        train_only="test_frozen::test_one_word_says_what_the_other_does",
        min_lr=RATE,
        decoupled_lr=f"{RULES}::test_embeddings_have_a_learning_rate_of_their_own",
        decoupled_min_lr=f"{RULES}::test_embeddings_have_a_learning_rate_of_their_own",
        lr_decay_style=RATE,
        lr_step_unit="test_epochs::test_rates_that_change_with_the_epoch",
        lr_decay_iters=RATE,
        lr_decay_samples=RATE,
        lr_warmup_iters=RATE,
        lr_warmup_samples=RATE,
        lr_warmup_fraction=RATE,
        lr_warmup_init=RATE,
        lr_wsd_decay_style=RATE,
        lr_wsd_decay_iters=RATE,
        lr_wsd_decay_samples=RATE,
        weight_decay=UPDATE,
        start_weight_decay=UPDATE,
        end_weight_decay=UPDATE,
        weight_decay_incr_style=UPDATE,
        clip_grad=UPDATE,
        adam_beta1=UPDATE,
        adam_beta2=UPDATE,
        adam_eps=UPDATE,
        sgd_momentum=f"{RULES}::test_sgd_is_torchs",
        lion_beta1=f"{RULES}::test_lion_is_the_published_formula",
        lion_beta2=f"{RULES}::test_lion_is_the_published_formula",
        muon_momentum=MUON,
        muon_nesterov=MUON,
        muon_scale_mode="test_muon::test_plain_linear_weights_move_as_with_torchs_muon",
        muon_extra_scale_factor=MUON,
        muon_num_ns_steps=MUON,
        muon_coefficient_type=MUON,
        muon_fp32_matmul_prec="test_muon::test_products_are_computed_as_they_are_told",
        optimizer_cpu_offload=WHERE,
        optimizer_offload_fraction=WHERE,
        nvme_offload_fraction=WHERE,
        nvme_offload_dir=WHERE,
        param_cpu_offload=f"{LAYOUT}::test_home_of_the_shards",
        exp_avg_dtype=ROUNDED,
        exp_avg_sq_dtype=ROUNDED,
        stochastic_rounding=ROUNDED,
        grad_reduce_in_bf16=IN_BF16,
        main_grads_dtype=IN_BF16,
        accumulate_allreduce_grads_in_fp32="test_state_formats::test_formats_that_contradict_each_other",
        gradient_accumulation_fusion="test_layers::test_gradient_accumulation_fusion_trains_to_the_same_weights",
        loss_averaging=f"{STEP}::test_losses_are_averaged_over_tokens_or_over_micro_batches",
    ),
    recompute=dict(
        recompute_granularity=AGAIN,
        recompute_method=AGAIN,
        recompute_num_layers=AGAIN,
        no_recompute_layers=AGAIN,
        recompute_modules=AGAIN,
    ),
    precision=dict(
        precision=FORMAT,
        amp_level=FORMAT,
        amp_custom_black_list=FORMAT,
        amp_custom_white_list=FORMAT,
        loss_scale=SCALE,
        initial_loss_scale=SCALE,
        min_loss_scale=SCALE,
        loss_scale_window=SCALE,
        hysteresis=SCALE,
    ),
    kernels=dict(
        device=f"{ARITHMETIC}::test_device",
        torch_compile=f"{ARITHMETIC}::test_torch_compile_compiles_each_layer",
        dump_graph="test_graph_dump::test_a_run_writes_the_graphs_of_each_rank",
        attention_backend=f"{ARITHMETIC}::test_attention_backend",
        flash_attention_version=f"{ARITHMETIC}::test_flash_attention_version",
        cross_entropy_chunk=f"{ARITHMETIC}::test_cross_entropy_chunk_is_the_rows_of_logits_at_a_time",
        **{
            name: f"{FUSIONS}::test_a_fused_kernel_is_used_unless_its_flag_says_no"
            for name in "bias_dropout_fusion bias_swiglu_fusion rope_fusion persist_layer_norm "
            "cross_entropy_loss_fusion".split()
        },
        masked_softmax_fusion=f"{FUSIONS}::test_plain_softmax_makes_all_scores_at_once",
        fused_linear=f"{FUSIONS}::test_products_without_biases",
        fuse_attn_qkv=f"{FUSIONS}::test_three_products_for_queries_keys_and_values",
        deterministic_mode="test_deterministic::test_cuda_is_asked_for_kernels_that_repeat",
        manual_gc_interval="test_garbage::test_a_run_collects_at_its_interval",
    ),
    checkpoint=dict(
        save=f"{RUN}::test_checkpoints_come_at_their_interval_and_at_the_end",
        load=f"{RUN}::test_load_goes_on_from_the_newest_or_from_the_step_that_is_asked_for",
        save_epoch="test_epochs::test_a_run_of_epochs",
        save_interval=f"{RUN}::test_checkpoints_come_at_their_interval_and_at_the_end",
        mean_time_to_interruption=f"{RUN}::test_auto_interval_follows_the_time_to_interruption",
        keep_last=f"{RUN}::test_checkpoints_come_at_their_interval_and_at_the_end",
        save_retain_interval=f"{RUN}::test_checkpoints_come_at_their_interval_and_at_the_end",
        async_save=f"{RUN}::test_async_save_goes_on_before_it_is_written",
        save_retries="test_manager::test_a_failed_save_is_tried_again",
        save_mirror="test_manager::test_the_mirror_takes_what_the_folder_does_not",
        save_copy="test_copies::test_copies_are_checkpoints_and_a_run_goes_on_from_them",
        max_failed_saves="test_manager::test_training_ends_at_max_failed_saves_in_a_row",
        ckpt_step=f"{RUN}::test_load_goes_on_from_the_newest_or_from_the_step_that_is_asked_for",
        auto_resume=f"{RUN}::test_auto_resume_allows_for_an_empty_folder",
        exit_on_missing_checkpoint="test_new_runs::test_what_needs_a_checkpoint_is_refused",
        resume_schedule="test_resumed_schedule::test_a_longer_run_follows_the_schedule_that_it_is_told_to",
        finetune=f"{RUN}::test_what_of_a_checkpoint_is_loaded",
        moe_use_upcycling="test_upcycling::test_a_run_starts_from_a_dense_checkpoint",
        use_checkpoint_args="test_from_checkpoint::test_the_shape_is_the_checkpoints",
        load_strictness="test_saving_runs::test_load_strictness",
        no_load_optim=f"{RUN}::test_what_of_a_checkpoint_is_loaded",
        no_save_optim=f"{RUN}::test_no_save_optim_leaves_weights_alone",
    ),
    guard=dict(
        check_replicas_interval=f"{RUN}::test_replicas_are_compared_at_their_interval",
        exit_signal_handler=f"{GUARDED}::test_a_signal_to_one_rank_saves_once_on_all_at_the_same_step",
        kill_switch_file=f"{GUARDED}::test_the_kill_switch_stops_with_a_checkpoint_and_then_keeps_others_from_starting",
        heartbeat_dir=f"{GUARDED}::test_a_heartbeat_says_what_a_rank_does_and_how_it_ended",
        on_nan=f"{GUARDED}::test_steps_that_are_not_finite_can_be_skipped_and_are_counted",
        on_spike=f"{GUARDED}::test_a_spike_is_told_or_skipped",
        spike_window=f"{RUN}::test_spike_window_is_how_many_steps_are_remembered",
        spike_threshold=f"{RUN}::test_spike_threshold_is_in_deviations_above_the_median",
        spike_skip_steps=f"{GUARDED}::test_a_spike_rolls_back_and_leaves_out_what_led_to_it",
        max_rollbacks=f"{GUARDED}::test_rollbacks_are_limited",
        iterations_to_skip=f"{RUN}::test_iterations_to_skip_are_passed_over",
        override=f"{GUARDED}::test_resuming_says_where_and_refuses_another_run",
    ),
    logging=dict(
        log_interval=f"{RUN}::test_log_lines_come_at_their_interval",
        log_ranks="test_log_ranks::test_ranks_that_speak",
        timing_log_level=f"{RUN}::test_timers_are_those_of_their_level",
        timing_log_option="test_timers::test_parts_of_a_pipeline_on_all_ranks",
        barrier_with_level_1_timing=f"{RUN}::test_timers_let_ranks_begin_together",
        log_timers_to_tensorboard=f"{RUN}::test_timers_in_tensorboard",
        console="test_console::test_who_wants_it_otherwise",
        log_file="test_console::test_a_pipe_and_the_file_get_megatrons_lines",
        progress_bar="test_console::test_who_wants_it_otherwise",
        log_epoch="test_epochs::test_a_run_of_epochs",
        log_memory_interval=f"{RUN}::test_memory_is_told_beside_what_was_planned",
        log_throughput="test_log_figures::test_throughput_stands_where_megatron_has_it",
        throughput_ignore_steps="test_throughput::test_the_mean_leaves_the_first_steps_of_a_start_out",
        straggler_detection="test_rank_watch::test_without_detection_nothing_is_measured",
        log_straggler="test_rank_watch::test_the_slowest_and_fastest_ranks_are_logged",
        straggler_minmax_count="test_rank_watch::test_the_slowest_and_fastest_ranks_are_logged",
        log_params_norm="test_log_figures::test_figures_of_all_ranks_do_not_depend_on_the_layout",
        log_num_zeros_in_grad="test_log_figures::test_figures_of_all_ranks_do_not_depend_on_the_layout",
        log_progress="test_progress_log::test_progress_of_a_run_that_is_taken_up_again",
        metrics_file=f"{RUN}::test_metrics_file",
        tensorboard_dir="test_metrics::test_tensorboard_has_megatrons_tags_over_iterations_and_samples",
        visualdl_dir="test_metrics::test_visualdl_gets_the_curves",
        wandb_project="test_metrics::test_weights_and_biases_gets_the_settings_and_the_curves",
        metrics_port="test_prometheus::test_a_run_serves_its_current_values",
        metrics_host="test_prometheus::test_a_run_serves_its_current_values",
        wandb_exp_name="test_metrics::test_weights_and_biases_gets_the_settings_and_the_curves",
        peak_tflops=f"{RUN}::test_mfu_is_a_share_of_the_peak",
        seed=f"{DATA}::test_seed_decides_weights_data_and_dropout",
        debug=f"{RUN}::test_debug_shows_tracebacks",
        hooks="test_hooks::test_places_in_order",
        on_event="test_events_of_runs::test_a_command_hears_of_the_end",
        webhook="test_events_of_runs::test_a_webhook_that_nobody_answers_does_not_hold_a_run_up",
        event_level="test_events_of_runs::test_a_webhook_that_nobody_answers_does_not_hold_a_run_up",
        event_rules="test_events_of_runs::test_a_disk_that_is_nearly_full",
    ),
    distillation=dict(
        teacher_load="test_distillation::test_any_layout_is_the_plain_loop",
        teacher_logits="test_teacher_logits::test_all_logits_equal_the_teacher",
        kd_alpha="test_distillation::test_any_layout_is_the_plain_loop",
        kd_temperature="test_distillation::test_any_layout_is_the_plain_loop",
        kd_loss="test_distillation::test_any_layout_is_the_plain_loop",
        kd_hidden_layers="test_distillation::test_hidden_states_are_those_of_the_plain_loop",
        kd_hidden_loss="test_distillation::test_hidden_states_are_those_of_the_plain_loop",
        kd_hidden_coeff="test_distillation::test_even_pairs",
    ),
    planner=dict(
        auto_parallel="test_plan_commands::test_auto_parallel_trains",
        max_global_batch_size=f"{LAYOUT}::test_max_global_batch_size_bounds_what_the_search_takes",
        tune_steps=f"{LAYOUT}::test_tune_steps_times_as_many_steps_of_the_best_three",
        parallel_plan="test_choices::test_a_plan_of_a_file_is_the_layout_that_its_flags_ask_for",
        dry_run=f"{LAYOUT}::test_dry_run_trains_nothing",
        wide="test_eighty_columns::test_wide_cuts_nothing",
        preflight=f"{LAYOUT}::test_preflight_checks_and_trains_nothing",
        allow_memory_overcommit="test_room::test_overcommitted_it_trains",
        world_size=CLUSTER,
        local_world_size=CLUSTER,
        device_name=CLUSTER,
        device_memory_gb=CLUSTER,
        memory_margin=f"{LAYOUT}::test_a_margin_of_memory",
        mtbf="test_goodput::test_mtbf_is_that_of_a_node",
        calibration=CLUSTER,
    ),
    profiling=dict(
        profile=f"{RUN}::test_profile_of_some_steps_with_shapes_or_without",
        profile_step_start=f"{RUN}::test_profile_of_some_steps_with_shapes_or_without",
        profile_step_end=f"{RUN}::test_profile_of_some_steps_with_shapes_or_without",
        profile_ranks="test_profiler::test_chosen_steps_of_chosen_ranks",
        profile_dir=f"{RUN}::test_profile_of_some_steps_with_shapes_or_without",
        profile_detailed=f"{RUN}::test_profile_of_some_steps_with_shapes_or_without",
    ),
)


@cache
def source_of(root, name: str) -> tuple[str, frozenset[str]]:
    """(text, functions) of the one file of tests with this name."""
    paths = list((root / "tests").rglob(f"{name}.py"))
    assert len(paths) == 1, f"{name}: {paths or 'there is no such file of tests'}"
    text = paths[0].read_text(encoding="utf-8")
    return text, frozenset(node.name for node in ast.parse(text).body if isinstance(node, ast.FunctionDef))


def spellings(setting) -> list[str]:
    """The words that set it: its name, its flag, and its other flags."""
    flag = setting.name.replace("_", "-")
    others = [word.partition("=")[0].rstrip("~") for word in setting.metadata["alias"]]
    return [setting.name, f"--{flag}", f"--no-{flag}", *others]


def test_every_setting_has_a_check_and_no_other():
    found = {group: set(checks) for group, checks in CHECKS.items()}
    assert found == {group: {setting.name for setting in fields(kind)} for group, kind in GROUPS.items()}


@pytest.mark.parametrize("group", GROUPS)
def test_checks_are_there_and_speak_of_their_settings(group, root):
    for setting in fields(GROUPS[group]):
        file, function = CHECKS[group][setting.name].split("::")
        text, functions = source_of(root, file)
        assert function in functions, f"{setting.name}: there is no {function} in {file}"
        assert any(word in text for word in spellings(setting)), f"{setting.name}: {file} does not mention it"
