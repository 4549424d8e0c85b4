"""Faults of what is written and stored."""

from tests.campaign.cases.case import Case

__all__ = ["STORED"]

WRITING, DAMAGE, HOSTILE, STORAGE = "Writing", "Stored damage", "Hostile input", "Storage"

STORED: tuple[Case, ...] = (
    # -- writing -------------------------------------------------------------------------------------------------------
    Case(
        1,
        WRITING,
        "kill -9 at more than 200 moments of a write, then resume: byte for byte the undisturbed dataset",
        (
            "faults/test_shard_killed.py::test_killed_before_any_change_of_a_file_the_reader_is_right_and_resuming_is_exact",
            "faults/test_shard_killed.py::test_killed_at_any_function_call_resuming_is_exact",
            "faults/test_shard_killed.py::test_ended_by_the_kernel_at_a_random_moment_resuming_is_exact",
            "faults/test_convert_killed.py",
            "faults/test_simulation_killed.py",
            "files/test_staging.py::test_killed_at_any_step_a_reader_finds_the_old_or_the_new_and_resuming_completes_it",
        ),
    ),
    Case(
        2,
        WRITING,
        "kill -9 without resuming: the reader refuses, verify lists what was left",
        (
            "faults/test_shard_killed.py::test_killed_before_any_change_of_a_file_the_reader_is_right_and_resuming_is_exact",
            "shard/test_verify.py::test_an_unfinished_write_is_reported",
            "shard/test_verify.py::test_an_unfinished_write_alone_is_no_dataset",
            "shard/test_verify.py::test_a_shard_that_the_manifest_does_not_list_is_reported",
        ),
    ),
    Case(
        3,
        WRITING,
        "full disk in the middle of a shard and of a manifest",
        (
            "shard/test_writer_disk.py::test_a_full_disk_in_the_middle_of_a_shard_is_an_error_that_resuming_recovers_from",
            "shard/test_writer_disk.py::test_a_full_disk_at_the_manifest_leaves_the_previous_dataset",
            "faults/test_convert_disk.py::test_a_full_disk_publishes_nothing_and_with_more_room_it_goes_on",
            "faults/test_convert_disk.py::test_a_full_disk_leaves_the_old_dataset_as_it_is",
        ),
    ),
    Case(
        4,
        WRITING,
        "two writers, one folder: the second is refused",
        (
            "shard/test_writer_folder.py::test_a_second_writer_is_refused_while_the_first_lives",
            "shard/test_writer_folder.py::test_a_second_writer_in_another_process_is_refused",
            "convert/test_convert.py::test_a_conversion_at_work_keeps_others_out",
            "files/test_locks.py",
        ),
    ),
    Case(
        5,
        WRITING,
        "a target that is read-only, vanishes, or takes no more files",
        (
            "faults/test_convert_disk.py::test_a_read_only_folder_is_named_and_stays_as_it_is",
            "faults/test_convert_disk.py::test_a_disk_that_takes_no_more_files_publishes_all_or_nothing",
            "shard/test_writer_disk.py::test_a_folder_that_may_not_be_written_is_an_error_that_names_it",
            "shard/test_writer_disk.py::test_a_folder_that_vanishes_is_an_error",
        ),
    ),
    Case(
        6,
        WRITING,
        "an exception in the user's function: which input, nothing published",
        (
            "faults/test_convert_interrupted.py::test_an_error_of_the_inputs_own_code_publishes_nothing",
            "convert/inputs/test_function.py::test_an_exception_of_the_function_is_its_own_with_a_note",
            "shard/test_writer.py::test_an_exception_in_the_users_code_leaves_no_dataset",
            "shard/test_writer.py::test_an_exception_leaves_the_previous_dataset",
        ),
    ),
    Case(
        7,
        WRITING,
        "SIGTERM, as Slurm sends it: a clean stop that can be resumed",
        (
            "faults/test_stopped.py",
            "faults/test_convert_killed.py::test_workers_of_a_process_that_is_killed_end_and_keep_nobody_out",
            "examples/test_demo.py::test_a_signal_ends_the_demo_with_all_its_processes_and_removes_the_files",
        ),
    ),
    Case(
        8,
        WRITING,
        "clock jumps and runs within the same second: the same bytes, no change unnoticed",
        (
            "faults/test_clock.py",
            "faults/test_shard_changes.py::test_a_shard_that_changes_between_two_reads_is_noticed",
        ),
    ),
    Case(
        9,
        WRITING,
        "keys that repeat, or have dots, unicode or `..`",
        (
            "shard/test_writer_samples.py::test_strange_ids_come_back_and_are_not_merged",
            "shard/test_writer_samples.py::test_a_repeated_id_is_refused",
            "shard/test_writer_samples.py::test_an_id_from_before_a_resume_is_remembered",
            "shard/test_names.py",
        ),
    ),
    Case(
        10,
        WRITING,
        "a sample larger than a shard may be, an empty sample, no samples",
        (
            "shard/test_writer.py::test_a_sample_too_large_for_a_shard_is_refused_and_the_writer_continues",
            "shard/test_writer.py::test_a_sample_that_fills_a_shard_exactly_is_written_and_one_byte_more_is_refused",
            "shard/test_writer_samples.py::test_a_refused_sample_leaves_no_trace",
            "shard/test_writer.py::test_without_samples_there_is_no_dataset",
        ),
    ),
    # -- stored damage -------------------------------------------------------------------------------------------------
    Case(
        11,
        DAMAGE,
        "a shard truncated within a payload",
        (
            "suites/test_damage.py",
            "shard/test_tar.py::test_every_shortened_archive_is_refused",
        ),
    ),
    Case(
        12,
        DAMAGE,
        "a shard truncated at the border of a member",
        (
            "suites/test_damage.py",
            "shard/test_tar.py::test_every_shortened_archive_is_refused",
            "shard/test_tar.py::test_an_archive_that_ends_in_one_tar_block_of_zeros_is_truncated",
        ),
    ),
    Case(
        13,
        DAMAGE,
        "a flipped bit in the header of a member",
        (
            "faults/test_shard_damage.py::test_a_flipped_bit_in_any_byte_of_any_member_is_named_with_its_item",
            "shard/test_tar.py::test_every_flipped_bit_of_a_header_is_refused_or_changes_nothing",
        ),
    ),
    Case(
        14,
        DAMAGE,
        "a flipped bit in a payload, at every byte of a small shard",
        (
            "faults/test_shard_damage.py::test_a_flipped_bit_in_any_byte_of_any_member_is_named_with_its_item",
            "faults/test_shard_damage.py::test_any_damaged_byte_of_a_compressed_shard_is_named_or_makes_no_difference",
            "suites/test_damage.py",
        ),
    ),
    Case(
        15,
        DAMAGE,
        "a missing shard",
        (
            "suites/test_damage.py",
            "faults/test_shard_damage.py::test_a_shard_that_goes_missing_later_is_named",
        ),
    ),
    Case(
        16,
        DAMAGE,
        "a shard too many, or of another dataset",
        (
            "suites/test_damage.py",
            "shard/test_verify.py::test_a_shard_that_the_manifest_does_not_list_is_reported",
            "suites/test_damage.py",
        ),
    ),
    Case(
        17,
        DAMAGE,
        "a shard swapped with another valid one",
        ("suites/test_damage.py",),
    ),
    Case(
        18,
        DAMAGE,
        "a manifest older than its shards",
        (
            "suites/test_damage.py",
            "shard/test_index_tars.py::test_an_archive_that_changed_is_noticed_and_can_be_indexed_again",
        ),
    ),
    Case(
        19,
        DAMAGE,
        "a manifest that is truncated or invalid",
        (
            "suites/test_damage.py",
            "shard/test_manifest.py",
        ),
    ),
    Case(
        20,
        DAMAGE,
        "zarr: a missing chunk, a corrupt chunk, corrupt metadata",
        (
            "faults/test_zarr_damage.py",
            "faults/test_zarr_metadata.py",
            "faults/test_zarr_special_files.py",
            "source/stored/test_missing_chunks.py",
        ),
    ),
    Case(
        21,
        DAMAGE,
        "NWB and HDF5 files that are truncated or open for writing",
        (
            "convert/nwb/test_faults.py::test_a_truncated_file_is_named_wherever_it_ends",
            "convert/nwb/test_faults.py::test_a_file_that_another_process_writes_to_is_refused_and_can_be_read_afterwards",
            "source/stored/test_other_formats.py::test_a_dataset_that_is_gone_or_has_shrunk_is_a_read_error",
            "source/stored/test_other_formats.py::test_a_damaged_chunk_of_a_dataset_is_a_read_error",
        ),
    ),
    Case(
        22,
        DAMAGE,
        "an audio header that lies about its length",
        (
            "convert/inputs/test_audio.py::test_headers_of_wav_files_are_believed_as_far_as_they_go",
            "convert/inputs/test_audio.py::test_a_file_cut_anywhere_is_refused",
            "shard/decoders/test_decode.py::test_a_sound_that_declares_too_many_frames_is_refused",
        ),
    ),
    # -- hostile input -------------------------------------------------------------------------------------------------
    Case(
        23,
        HOSTILE,
        "pickles: a member, an object array in a .npy, a torch.load payload",
        (
            "faults/test_shard_hostile.py::test_a_hostile_member_is_reported_or_refused_with_its_item_and_nothing_runs",
            "shard/test_pickles.py",
        ),
    ),
    Case(
        24,
        HOSTILE,
        "names that are absolute or have `../`",
        (
            "shard/test_tar.py::test_names_that_point_outside_are_refused",
            "faults/test_shard_hostile.py::test_links_devices_and_names_that_point_outside_are_reported",
        ),
    ),
    Case(
        25,
        HOSTILE,
        "members that are links or devices",
        (
            "shard/test_tar.py::test_members_that_are_not_files_are_refused",
            "faults/test_shard_hostile.py::test_links_devices_and_names_that_point_outside_are_reported",
        ),
    ),
    Case(
        26,
        HOSTILE,
        "tar bomb, absurd size, a million members, deep PAX headers",
        (
            "faults/test_shard_hostile.py::test_an_absurd_size_is_reported_and_takes_no_memory",
            "faults/test_shard_hostile.py::test_very_many_items_are_indexed",
            "faults/test_shard_hostile.py::test_an_item_of_very_many_members_is_read_or_refused",
            "shard/test_tar.py::test_endless_extension_headers_are_refused",
            "shard/test_tar.py::test_an_extension_header_of_absurd_size_is_refused_before_it_is_read",
        ),
    ),
    Case(
        27,
        HOSTILE,
        "gzip, zstd and blosc bombs",
        (
            "faults/test_shard_hostile.py::test_a_gzip_bomb_is_reported_and_takes_no_memory",
            "shard/test_compression.py::test_a_bomb_is_refused_before_it_takes_memory",
            "shard/decoders/test_decode.py::test_a_bomb_is_refused",
            "faults/test_zarr_damage.py::test_a_chunk_that_declares_a_huge_size_takes_no_memory",
        ),
    ),
    Case(
        28,
        HOSTILE,
        "a JSON bomb; NaN and Infinity in metadata",
        (
            "faults/test_shard_hostile.py::test_a_hostile_member_is_reported_or_refused_with_its_item_and_nothing_runs",
            "shard/test_codec.py::test_values_that_json_would_change_are_refused_with_their_path",
            "shard/test_codec.py::test_endless_nesting_is_refused",
            "shard/test_codec_payloads.py::test_json_is_read_as_python_reads_it",
        ),
    ),
    Case(
        29,
        HOSTILE,
        "an address that would run a command",
        ("faults/test_shard_hostile.py::test_an_address_is_never_a_command",),
    ),
    # -- storage -------------------------------------------------------------------------------------------------------
    Case(
        30,
        STORAGE,
        "5xx, 429, a reset in mid-body, a short read, a wrong Content-Length",
        (
            "faults/test_http_store.py::test_whatever_the_server_answers_rows_are_right_or_an_error_names_them",
            "faults/test_http_store.py::test_a_fault_that_passes_costs_nothing_but_time",
            "files/stores/test_faults.py::test_faults_that_pass_are_not_noticed",
            "files/stores/test_faults.py::test_faults_that_stay_are_one_error_that_says_all",
            "files/stores/test_faults.py::test_whole_objects_and_lists_are_repeated_too",
            "files/stores/test_faults.py::test_parts_of_an_upload_are_sent_again",
            "files/stores/test_faults.py::test_an_object_whose_answer_was_lost_counts_as_put",
        ),
        "S3 is `rclone serve s3` behind a proxy that breaks its answers; no server of a cloud can be used here.",
    ),
    Case(
        31,
        STORAGE,
        "a store that stalls for 200 s: a deadline ends the wait",
        (
            "faults/test_http_store.py::test_a_server_that_stalls_is_a_read_error_after_the_stated_time",
            "faults/test_http_store.py::test_a_batch_that_waits_for_a_stalled_server_is_named_when_its_time_is_over",
            "files/stores/test_stalls.py::test_a_request_that_stalls_is_repeated",
            "files/stores/test_stalls.py::test_a_server_that_stalls_for_ever_is_an_error_within_the_deadline",
            "files/stores/test_stalls.py::test_a_server_that_drips_is_an_error_within_the_deadline",
            "files/stores/test_stalls.py::test_uploads_and_lists_that_stall_end_within_the_deadline",
        ),
        "With a shorter deadline than the one of two minutes.",
    ),
    Case(
        32,
        STORAGE,
        "credentials that expire in the middle of an epoch",
        (
            "faults/test_http_store.py::test_credentials_that_expire_in_mid_epoch_are_an_error_and_with_others_it_resumes",
            "files/stores/test_faults.py::test_credentials_that_expire_are_asked_for_again",
            "files/stores/test_faults.py::test_credentials_that_expire_without_a_provider_are_an_error_at_once",
            "files/stores/test_credentials.py::test_credentials_are_renewed_before_they_expire",
        ),
        "A server that begins to answer 401 and 403; no cloud account can be used here.",
    ),
    Case(
        33,
        STORAGE,
        "an object that is replaced during an epoch",
        (
            "faults/test_shard_changes.py::test_a_shard_that_changes_in_the_middle_of_an_epoch_gives_exact_items_or_an_error",
            "faults/test_shard_changes.py::test_beside_a_process_that_changes_a_shard_every_item_is_exact_or_refused",
            "files/stores/test_faults.py::test_an_object_that_is_replaced_meanwhile_is_never_mixed",
            "files/stores/test_stores.py::test_a_pinned_version_is_another_after_a_change",
        ),
    ),
    Case(
        34,
        STORAGE,
        "a cache folder that is full, deleted under us, or shared by 4 processes",
        (
            "faults/test_remote_cache_folder.py",
            "faults/test_remote_killed.py",
            "files/spans/test_folder.py",
            "files/spans/test_remote_folder.py::test_a_cache_that_is_harmed_is_mended",
            "laws/test_remote_cache.py",
        ),
    ),
    Case(
        35,
        STORAGE,
        "a stale NFS handle",
        ("source/test_native.py::test_a_file_that_shrinks_under_its_map_ends_the_copy",),
        "No NFS can be mounted here; the kernel answers a stale map with the SIGBUS of a file that shrinks.",
    ),
)
