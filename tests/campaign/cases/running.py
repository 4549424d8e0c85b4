"""Faults of what runs: workers, resumed and distributed trainings, odd shapes, resources."""

from tests.campaign.cases.case import Case

__all__ = ["RUNNING"]

WORKERS, RESUME, RANKS = "Workers", "Order and resume", "Distributed"
SHAPES, RESOURCES = "Shapes and values", "Resources"

RUNNING: tuple[Case, ...] = (
    # -- workers -------------------------------------------------------------------------------------------------------
    Case(
        36,
        WORKERS,
        "SIGKILL, SIGSEGV, out of memory or os._exit in a worker: replaced or raised, exact continuation",
        (
            "faults/test_worker_deaths.py",
            "faults/test_worker_replacement.py::test_random_deaths_of_workers_change_nothing",
        ),
        "The kernel's end for a worker that takes all memory is its SIGKILL, which is sent here by hand.",
    ),
    Case(
        37,
        WORKERS,
        "an exception in transform, collate, read-ahead thread or copy to the device",
        (
            "run/test_executors.py",
            "run/test_threads.py",
            "feed/test_device.py::test_an_error_of_the_copy_comes_once_after_the_batches_before_it",
        ),
        "There is no GPU here: the copy runs on a stand-in for its streams.",
    ),
    Case(
        38,
        WORKERS,
        "a transform that hangs: the timeout names the sample",
        ("faults/test_worker_hangs.py::test_a_hanging_transform_is_a_worker_error_that_names_the_items",),
    ),
    Case(
        39,
        WORKERS,
        "a transform that cannot be pickled, under spawn",
        ("faults/test_worker_pickling.py",),
    ),
    Case(
        40,
        WORKERS,
        "fork after the parent used zarr, h5py, asyncio and threads",
        (
            "faults/test_fork_after_use.py",
            "source/stored/test_workers.py::test_a_fork_after_a_read_has_threads_of_its_own",
            "source/stored/test_workers.py::test_a_fork_in_the_middle_of_a_read_does_not_hang",
            "source/stored/test_other_formats.py::test_a_fork_reads_while_a_thread_of_its_parent_reads",
            "core/test_cache.py::test_a_forked_process_loads_what_a_thread_of_its_parent_was_loading",
        ),
    ),
    Case(
        41,
        WORKERS,
        "spawn, forkserver and fork",
        (
            "faults/test_worker_replacement.py::test_one_dead_worker_is_replaced_by_one_and_the_others_keep_running",
            "laws/test_loader_order.py::test_worker_processes_give_the_same_order",
            "laws/test_loader_order.py::test_spawned_worker_processes_give_the_same_order",
        ),
        "There is no macOS here; its start method, spawn, runs on Linux.",
    ),
    Case(
        42,
        WORKERS,
        "a loader inside another, two at once, one inside a thread",
        ("faults/test_loaders_together.py",),
    ),
    Case(
        43,
        WORKERS,
        "Ctrl-C during an epoch, while workers start, while resuming",
        ("faults/test_interrupts.py", "faults/test_stopped.py"),
    ),
    # -- order and resume ----------------------------------------------------------------------------------------------
    Case(
        44,
        RESUME,
        "workers 0 to 4 x ranks 1 to 4 x batch sizes: one global order",
        (
            "laws/test_loader_order.py::test_workers_0_to_4_and_ranks_1_to_4_give_one_order",
            "laws/test_loader_order.py::test_the_order_depends_neither_on_workers_nor_on_ranks",
        ),
    ),
    Case(
        45,
        RESUME,
        "resume after every step of a small epoch",
        (
            "suites/test_loaders.py",
            "laws/test_plan_resume.py::test_resuming_yields_the_batches_that_were_left",
        ),
    ),
    Case(
        46,
        RESUME,
        "three resumes in a row with other workers, ranks and batch sizes",
        (
            "laws/test_loader_resume_changed.py",
            "laws/test_plan_resume.py::test_a_batch_size_changed_again_and_again_still_delivers_every_item_once_in_order",
            "plan/test_cursor.py::test_a_batch_size_may_change_three_times",
        ),
    ),
    Case(
        47,
        RESUME,
        "a state before the first batch, after the last, at the edge of an epoch, loaded twice, in another process",
        ("suites/test_loaders.py", "laws/test_loader_resume.py::test_a_killed_process_is_resumed_exactly"),
    ),
    Case(
        48,
        RESUME,
        "a state of another dataset, seed or version is refused",
        ("plan/test_cursor.py", "suites/test_loaders.py"),
    ),
    Case(
        49,
        RESUME,
        "batches made ahead and not delivered do not count",
        ("run/test_executors.py", "run/test_auto.py::test_the_state_during_the_choice_counts_what_was_delivered"),
    ),
    Case(
        50,
        RESUME,
        "resume with a list of bad items that has grown since",
        (
            "faults/test_shard_substitutes.py::test_resuming_is_exact_when_more_items_are_bad_than_before",
            "faults/test_shard_substitutes.py::test_order_and_resume_are_exact_with_substitutes",
        ),
    ),
    Case(
        51,
        RESUME,
        "augmentation has the same bits for any number of workers and after a resume",
        (
            "recipes/workersafe/test_workers.py",
            "feed/test_collate.py::test_each_item_has_its_own_bits_wherever_it_is_made",
            "laws/test_loader_resume_changed.py",
        ),
    ),
    Case(
        52,
        RESUME,
        "an index of 10⁹ samples: resume in less than 100 ms and 50 MB",
        (
            "laws/test_loader_resume.py::test_resuming_far_into_a_billion_items_takes_less_than_100_ms_and_50_mb",
            "laws/test_loader_resume.py::test_worker_processes_do_not_get_a_list_of_all_batches",
        ),
    ),
    # -- distributed ---------------------------------------------------------------------------------------------------
    Case(
        53,
        RANKS,
        "uneven shards, 2 to 4 real gloo ranks: equally many steps, no hang",
        (
            "faults/test_ranks.py::test_ranks_over_uneven_shards_make_equally_many_steps_and_share_the_order",
            "recipes/webdataset/test_ranks.py::test_two_gloo_ranks_see_all_samples_once_in_equally_many_steps",
            "laws/test_plan_ranks.py",
        ),
    ),
    Case(
        54,
        RANKS,
        "fewer samples than ranks; fewer shards than ranks",
        (
            "faults/test_ranks.py::test_fewer_shards_or_items_than_ranks_leave_no_rank_waiting",
            "laws/test_loader_order.py::test_fewer_batches_than_ranks_leave_no_rank_waiting",
            "laws/test_loader_order.py::test_fewer_items_than_ranks_are_refused_on_construction",
        ),
    ),
    Case(
        55,
        RANKS,
        "one rank raises: the others stop",
        ("faults/test_ranks.py::test_when_one_rank_raises_the_others_stop",),
    ),
    Case(
        56,
        RANKS,
        "a rank is killed, and the run restarts with fewer ranks",
        (
            "faults/test_ranks.py::test_a_rank_is_killed_and_fewer_ranks_resume_where_all_of_them_stood",
            "laws/test_plan_ranks.py::test_another_number_of_ranks_resumes_where_the_first_stopped",
        ),
    ),
    Case(
        57,
        RANKS,
        "validation covers every sample exactly once",
        (
            "laws/test_plan_coverage.py",
            "laws/test_plan_ranks.py::test_pad_shares_the_one_global_order_round_by_round_with_full_shapes_on_every_rank",
            "laws/test_loader_order.py::test_two_gloo_ranks_see_all_items_once_in_equally_many_steps",
            "faults/test_ranks.py::test_ranks_over_uneven_shards_make_equally_many_steps_and_share_the_order",
        ),
    ),
    # -- shapes and values ---------------------------------------------------------------------------------------------
    Case(
        58,
        SHAPES,
        "a dataset or split of no samples",
        (
            "shard/test_writer.py::test_without_samples_there_is_no_dataset",
            "source/test_array.py",
            "source/test_dataset.py::test_a_dataset_of_length_0_is_refused",
            "convert/test_splits.py::test_every_group_is_on_one_side_and_no_split_is_empty",
            "convert/test_convert.py::test_a_split_by_time_that_leaves_a_split_empty_is_refused",
        ),
    ),
    Case(
        59,
        SHAPES,
        "a chunk larger than the dataset, a window longer than the recording, a batch larger than the dataset",
        (
            "plan/test_plan.py::test_a_batch_larger_than_the_data_is_padded_round_and_round",
            "convert/nwb/test_windows.py::test_a_window_longer_than_the_recording_says_both_lengths",
            "plan/test_orders.py::test_a_window_larger_than_the_data_is_refused_with_the_largest_that_fits",
            "source/stored/test_select.py::test_a_last_chunk_that_extends_beyond_the_array_counts_as_a_whole_chunk",
        ),
    ),
    Case(
        60,
        SHAPES,
        "NaN, infinities and constant data in statistics (deviation 0)",
        (
            "transform/test_moments.py",
            "transform/test_standardize.py::test_constant_channels_come_out_as_zeros_and_other_values_of_them_as_their_distance",
        ),
    ),
    Case(
        61,
        SHAPES,
        "dtypes and byte orders, 0-d, bool, structured, more than 2³¹ elements",
        (
            "shard/test_codec.py::test_any_array_comes_back_and_numpy_itself_reads_it",
            "shard/test_codec.py::test_arrays_come_back_bit_for_bit",
            "shard/test_codec.py::test_records_and_titles_come_back",
            "source/stored/test_source.py::test_every_type_and_byte_order_is_read",
            "source/test_large.py",
        ),
    ),
    Case(
        62,
        SHAPES,
        "`len` is what iterating gives, for every tail",
        (
            "laws/test_plan_coverage.py::test_the_number_of_batches_is_what_iteration_yields",
            "run/test_executors.py",
        ),
    ),
    # -- resources -----------------------------------------------------------------------------------------------------
    Case(
        63,
        RESOURCES,
        "after exit, exception and Ctrl-C: no process, thread, file, shared memory or semaphore left",
        ("faults/test_leaks.py", "faults/test_interrupts.py", "faults/test_stopped.py"),
    ),
    Case(
        64,
        RESOURCES,
        "200 epochs: the memory of no process grows",
        ("soak/test_epochs.py",),
    ),
    Case(
        65,
        RESOURCES,
        "/dev/shm of 64 MB and 256 open files: works, or a clear message",
        (
            "faults/test_small_machine.py::test_batches_larger_than_dev_shm_arrive_with_256_open_files",
            "source/tar/test_files.py::test_more_shards_than_files_may_be_open_are_read_in_turns",
            "faults/test_shard_changes.py::test_more_shards_than_the_limit_of_open_files_are_read",
        ),
    ),
    Case(
        66,
        RESOURCES,
        "one CPU of a large machine: threads and workers are as many as may run",
        ("faults/test_small_machine.py::test_one_cpu_of_several_is_noticed_and_enough", "files/test_machine.py"),
        "One CPU of the two that there are here, by affinity and by a control group.",
    ),
    Case(
        67,
        RESOURCES,
        "the interpreter ends within a second of close()",
        (
            "faults/test_small_machine.py::test_nothing_keeps_the_interpreter_after_close",
            "faults/test_leaks.py::test_an_open_loader_does_not_keep_the_interpreter_alive",
        ),
    ),
)
