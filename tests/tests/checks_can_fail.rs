//! Runs each check on a backend that breaks its sentence: the check must fail, for the right reason.

mod messages;
mod mutants;

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use libtest_mimic::{Arguments, Failed, Trial};
use peerlane_tests::checks::all;
use peerlane_tests::middleware::{Erased, Layered};
use peerlane_tests::{Harness, HostHarness, run_bounded};

use mutants::{EngineMutant, FabricMutant, Fault, Flaw, FusedLayer, StartFault, with_flaw};

/// The limit of the waits that a fault makes time out, shorter than for a real backend.
const SHORT: Duration = Duration::from_secs(1);
/// The limit of all other waits, which is long enough for a busy machine.
const LONG: Duration = Duration::from_secs(10);

/// The checks that compare how long a call of the backend takes with the timeout.
const MEASURED: [&str; 4] = [
    "dropping_an_engine_with_a_blocked_wait_returns",
    "park_returns_when_a_flag_of_this_rank_is_signalled",
    "park_returns_when_the_waker_is_used",
    "park_returns_at_its_limit",
];

/// Faults of engines: the fault, the check that must find it, and a part of the text of its failure.
const ENGINES: &[(Fault, &str, &str)] = &[
    (
        Fault::OpsBackwards,
        "ops_to_one_peer_take_effect_in_submission_order",
        "the second flag has the value",
    ),
    (
        Fault::SignalsFirst,
        "bytes_put_before_a_signal_are_readable_when_the_flag_is_seen",
        "bytes from rank",
    ),
    (
        Fault::SignalsFirst,
        "a_signal_to_oneself_takes_effect_after_everything_before_it_is_complete",
        "before the signal",
    ),
    (Fault::SignalsInHalves, "a_signal_stores_all_64_bits_at_once", "halves of two values"),
    (
        Fault::WaitsIgnored,
        "a_wait_holds_everything_behind_it_until_the_flag_is_reached",
        "the ops after the wait are complete",
    ),
    (
        Fault::WaitsHoldEverything,
        "a_wait_holds_everything_behind_it_until_the_flag_is_reached",
        " to complete",
    ),
    (
        Fault::BlockedHoldsOthers,
        "a_blocked_engine_does_not_hold_the_others",
        "flag 8 to reach the value 1",
    ),
    (Fault::WaitsIgnored, "a_wait_acquires_what_any_writer_published", "is 0xa5, expected"),
    (
        Fault::ResetsForgotten,
        "the_reset_of_a_wait_takes_effect_before_anything_behind_it",
        "the flag has the value 1 after the last reset",
    ),
    (Fault::SignalsFirst, "no_flag_is_seen_before_the_flush_of_the_bytes_it_announces", " saw"),
    (
        Fault::CompleteAtOnce,
        "a_completed_ticket_frees_its_sources",
        "whose source was overwritten after completion",
    ),
    (
        Fault::CompleteAtOnce,
        "a_completed_put_to_oneself_is_visible_here",
        "destination of a completed put to the own rank",
    ),
    (Fault::CompletionGoesBack, "completion_is_monotone", "the last completed ticket went back"),
    (
        Fault::EmptySlicesHaveNoTicket,
        "an_empty_slice_gets_a_ticket",
        "the first ticket is 0, expected 1",
    ),
    (
        Fault::EmptySlicesCompleteAtOnce,
        "an_empty_slice_gets_a_ticket",
        "is complete, but an op before it is a wait",
    ),
    (
        Fault::FullQueueTakesAPart,
        "a_full_queue_takes_nothing_of_a_slice",
        "destination of the slice that was refused",
    ),
    (
        Fault::LongSlicesNeverFit,
        "a_slice_within_the_limit_fits_an_empty_queue",
        "ops to an empty queue",
    ),
    (
        Fault::ReleaseDoesNothing,
        "release_lets_every_queued_wait_pass_within_a_bound",
        "a released engine to drain",
    ),
    (
        Fault::ReleasedTakesMore,
        "a_released_engine_drains_and_takes_no_more",
        "expected Err(Aborted)",
    ),
    (
        Fault::ReleaseLeavesWork,
        "a_drained_engine_touches_no_memory",
        "a region that the engine was copying to: byte",
    ),
    (Fault::PutsLoseAByte, "a_put_of_any_length_arrives_whole", "a put of 65 bytes: byte 128"),
    (
        Fault::PutsAreRoundedUp,
        "a_put_at_any_aligned_offset_writes_only_its_own_bytes",
        "1 bytes from offset 0 to offset 0: byte 1",
    ),
    (
        Fault::OneOpMoreIsTaken,
        "a_slice_of_exactly_the_limit_is_taken",
        "one more than the limit: submit returned ticket",
    ),
    (Fault::TheLimitIsRefused, "a_slice_of_exactly_the_limit_is_taken", "one less, please"),
    (
        Fault::OutsideIsTaken,
        "a_span_outside_its_region_is_refused",
        "ends after the region: submit returned ticket",
    ),
    (Fault::ErrorsAreForgotten, "the_first_error_poisons_the_engine", "expected DeviceLost"),
    (
        Fault::DropWaits,
        "dropping_an_engine_with_a_blocked_wait_returns",
        "the drop of the engine took",
    ),
    (
        Fault::DropLeavesWork,
        "a_dropped_engine_touches_no_memory",
        "a region that the engine was copying to: byte",
    ),
    (
        Fault::MissingOpsAreTaken,
        "an_op_that_the_engine_lacks_is_refused",
        "a wait, without queued_wait: submit returned ticket",
    ),
    (
        Fault::LateOpsAreLost,
        "an_engine_refuses_or_runs_ops_with_peers_that_were_connected_after_its_creation",
        "flag 0 to reach the value 1",
    ),
    (Fault::SignalsSpill, "flags_of_one_region_do_not_disturb_each_other", "flag"),
    (Fault::SignalsSpill, "a_region_tells_what_its_flags_hold", "flag_value(1) returned"),
    (Fault::PeersMustHelp, "a_polled_engine_moves_when_it_is_polled", " to complete"),
    (
        Fault::ParkIsDeaf,
        "park_returns_when_a_flag_of_this_rank_is_signalled",
        "although a flag was signalled",
    ),
    (Fault::AlwaysBusy, "an_idle_or_blocked_engine_is_not_busy", " to be not busy"),
    (Fault::WakerIsDeaf, "park_returns_when_the_waker_is_used", "although its waker was used"),
    (
        Fault::ComputesBeside,
        "an_engine_beside_compute_copies_no_more_by_compute_units",
        "compute units copy 1 bytes beside compute, and 0 otherwise",
    ),
    (Fault::ParkIsLong, "park_returns_at_its_limit", "at most its limit of"),
    (Fault::GetsLoseAByte, "a_get_copies_exactly_its_bytes", "a get of 65 bytes: byte 128"),
    (Fault::PutsAreRoundedUp, "a_get_copies_exactly_its_bytes", "a get of 1 bytes: byte 65"),
    (
        Fault::GetsFirst,
        "gets_and_puts_with_one_peer_take_effect_in_submission_order",
        "blocks that were put and got back",
    ),
    (
        Fault::PutsOvertakeGets,
        "gets_and_puts_with_one_peer_take_effect_in_submission_order",
        "sent from the destinations of its gets",
    ),
    (
        Fault::SignalsFirst,
        "a_signal_to_a_peer_comes_after_the_gets_from_it",
        "bytes of a get before a signal, whose source was then overwritten",
    ),
    (
        Fault::SignalsFirst,
        "a_signal_to_oneself_announces_the_gets_before_it",
        "announced by a signal to the own rank",
    ),
    (Fault::CompleteAtOnce, "a_completed_get_is_visible_here", "destination of a completed get"),
    (
        Fault::GetsLoseAByte,
        "a_get_from_oneself_is_a_local_copy",
        "a get from the own rank, allocated memory",
    ),
    (
        Fault::WaitsIgnored,
        "a_get_behind_a_wait_sees_what_the_wait_acquired",
        "the get after the wait is complete",
    ),
    (
        Fault::OutsideIsTaken,
        "a_get_outside_its_regions_is_refused",
        "ends after the region: submit returned ticket",
    ),
    (
        Fault::ReductionsLoseASource,
        "a_reduction_combines_its_sources_in_their_order",
        "of 2 sources of 1 elements",
    ),
    (
        Fault::OpsBackwards,
        "a_reduction_follows_the_copies_to_oneself_before_it",
        "a sum behind copies",
    ),
    (
        Fault::ReductionsLast,
        "a_put_behind_a_reduction_sends_its_result",
        "the sum of the rank before",
    ),
    (Fault::OutsideIsTaken, "a_reduction_that_cannot_run_is_refused", "that is not prepared"),
    (Fault::RowsLoseTheLast, "rows_arrive_at_their_pitch", "a put of 1 rows of 1 bytes"),
    (
        Fault::OpsBackwards,
        "a_copy_of_rows_keeps_its_place_in_the_order",
        "rows between two puts: byte",
    ),
    (
        Fault::OutsideIsTaken,
        "rows_that_leave_their_region_or_overlap_are_refused",
        "a destination whose last row is outside: submit returned ticket",
    ),
    (Fault::PlacesAreKept, "a_command_runs_like_its_op", "the bytes of start 2"),
    (
        Fault::EmptySlicesHaveNoTicket,
        "a_command_that_names_no_bound_region_is_refused",
        "a slice was refused, but it took ticket",
    ),
];

/// Faults of fused starts: the fault, the check that must find it, and a part of the text of its
/// failure.
const STARTS: [(StartFault, &str, &str); 8] = [
    (StartFault::TurnsForgotten, "a_fused_start_has_the_effects_of_its_ops", "start 1, 1 bytes"),
    (
        StartFault::OpsComeLater,
        "ops_and_fused_starts_take_effect_in_their_order",
        "start 1, copy of the block of rank 0",
    ),
    (StartFault::SlotsReadFirst, "tagged_data_is_read_when_it_has_arrived", "start 1, 1 bytes"),
    (
        StartFault::ReleaseDoesNothing,
        "a_release_ends_fused_starts_that_wait",
        "released starts to end",
    ),
    (
        StartFault::ReplacedProgramsStay,
        "a_program_can_be_replaced_between_starts",
        "start 2, 300 bytes of rank 0: byte",
    ),
    (
        StartFault::NoDigests,
        "signals_carry_the_digest_of_their_start",
        "start 1: the flag of block 0 has the value 256,",
    ),
    (
        StartFault::AnyOpsAreTaken,
        "ops_that_no_launch_runs_are_refused",
        "other lengths in odd starts: compiled",
    ),
    (
        StartFault::AnyBlocksFit,
        "blocks_that_do_not_fit_on_the_device_are_refused",
        "engines have 8 blocks each, expected at most 2",
    ),
];

/// Faults of engines that random programs of messages must find.
const MESSAGES: [Fault; 4] =
    [Fault::SignalsFirst, Fault::PutsLoseAByte, Fault::GetsLoseAByte, Fault::PutsAreRoundedUp];

fn programs_fail(fault: Fault) -> Result<(), Failed> {
    let polls: Arc<[_; 2]> = Arc::default();
    let mutant = |rank| EngineMutant { fault, rank, polls: Arc::clone(&polls) };
    match messages::run(mutant, 2, 0..100, LONG) {
        Err(difference) if difference.starts_with("seed ") => Ok(()),
        Err(other) => Err(format!("another failure: {other}").into()),
        Ok(()) => Err("no program has found the fault".into()),
    }
}

fn main() -> ExitCode {
    let mut trials = Vec::new();
    for (fault, check, expected) in ENGINES {
        let run = move || {
            let polls = Arc::default();
            let layered = Layered::new(HostHarness::default(), "mutant", move |rank| {
                EngineMutant { fault: *fault, rank, polls: Arc::clone(&polls) }
            });
            let timeout = if MEASURED.contains(check) { SHORT } else { LONG };
            fails(check, expected, layered.timeout(timeout).limits(limits(expected)))
        };
        trials.push(Trial::test(format!("{check}::{fault:?}"), run));
    }
    for (fault, check, expected) in STARTS {
        let layered = move |fault| {
            let layer = FusedLayer::new(fault);
            Layered::new(HostHarness::default(), "fused", move |_| layer.clone()).timeout(LONG)
        };
        let finds = move || fails(check, expected, layered(fault).limits(limits(expected)));
        trials.push(Trial::test(format!("{check}::{fault:?}"), finds));
        let passes = move || passes(check, layered(StartFault::None));
        trials.push(Trial::test(format!("{check}::without_a_fault"), passes));
    }
    for fault in MESSAGES {
        let name = format!("random_programs_of_messages::{fault:?}");
        trials.push(Trial::test(name, move || programs_fail(fault)));
    }
    trials.extend([
        flawed(
            Flaw::AnyBytesAreAKey,
            "AnyBytesAreAKey",
            "malformed_keys_are_refused",
            "was decoded without an error, expected InvalidKey",
        ),
        flawed(
            Flaw::NoKeyPanics,
            "NoKeyPanics",
            "malformed_keys_are_refused",
            "panicked: bytes are a key",
        ),
        flawed(Flaw::KeysGrow, "KeysGrow", "a_key_survives_encoding", "region_bytes is 9"),
        flawed(
            Flaw::RefusedKeysOpen,
            "FreedKeysOpen",
            "the_key_of_freed_memory_is_refused",
            "of freed memory of rank",
        ),
        flawed(
            Flaw::RefusedKeysOpen,
            "ChangedKeysOpen",
            "malformed_keys_are_refused",
            "import gave the registration",
        ),
        flawed(
            Flaw::RefusesFlagsOfTheHost,
            "RefusesFlagsOfTheHost",
            "what_one_fabric_allocated_another_can_register",
            "flags are in memory of the device only",
        ),
        flawed(
            Flaw::RefusesNoBytes,
            "RefusesNoBytes",
            "memory_of_no_bytes_is_memory",
            "there must be a byte",
        ),
        flawed(
            Flaw::ConnectsOnce,
            "ConnectsOnce",
            "a_second_connection_to_a_peer_changes_nothing",
            "connect rank 0 again: the rank is connected",
        ),
        flawed(
            Flaw::AliasesAreCopies,
            "AliasesAreCopies",
            "ones_own_key_gives_an_alias",
            "written through aliases",
        ),
        flawed(
            Flaw::RegisteredIsCopied,
            "RegisteredIsCopied",
            "what_one_fabric_allocated_another_can_register",
            "flag 3 to reach the value",
        ),
        flawed(
            Flaw::AllocatesDirty,
            "AllocatesDirty",
            "allocated_memory_is_zeroed",
            "allocation 0 of 8 bytes: byte 0 is 0x01, expected 0x00",
        ),
        flawed(
            Flaw::AdoptsAnyAddress,
            "AdoptsAnyAddress",
            "memory_of_another_device_is_refused",
            "adopt of device memory of another device as Data succeeded",
        ),
        // The memory of every mutant is that of a fabric that is connected to itself.
        flawed(
            Flaw::ImportsUnconnected,
            "ImportsUnconnected",
            "memory_of_a_rank_that_is_not_connected_cannot_be_imported",
            "import in a fabric without connections succeeded",
        ),
        flawed(
            Flaw::ReusedAsItWas,
            "ReusedAsItWas",
            "memory_that_is_reused_is_zeroed",
            "flag 0 is 1, expected 0",
        ),
        flawed(
            Flaw::ReopensAsItself,
            "ReopensAsItself",
            "a_fabric_opens_again_as_another_rank",
            "the fabric was reopened as rank 1, but it is rank 0",
        ),
        flawed(Flaw::OffersMore, "OffersMore", "an_engine_is_what_its_fabric_offers", "is offered"),
        flawed(
            Flaw::TakesAnyKind,
            "TakesAnyKind",
            "a_kind_that_is_not_offered_is_refused",
            "an engine of a kind that is not offered has the kind",
        ),
        flawed(
            Flaw::AnyAddressConnects,
            "AnyAddressConnects",
            "malformed_addresses_are_refused",
            "returned no error, expected Mismatch",
        ),
    ]);
    trials.push(Trial::test("every_check_has_a_mutant", every_check_has_a_mutant(&trials)));
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}

fn flawed(flaw: Flaw, name: &str, check: &'static str, expected: &'static str) -> Trial {
    Trial::test(format!("{check}::{name}"), move || {
        let limit_of = Box::new(limits(expected));
        with_flaw(flaw, || fails(check, expected, FabricMutant { limit_of }))
    })
}

/// Returns the limit of each wait if a check must fail with a text that has `expected`.
///
/// Only a wait that is named there is short. If it times out, the text is the expected one, whatever the load of the machine.
fn limits(expected: &'static str) -> impl Fn(&str) -> Duration + Send + Sync + 'static {
    move |wait| if wait.contains(expected) { SHORT } else { LONG }
}

fn fails(check: &str, expected: &str, harness: impl Harness) -> Result<(), Failed> {
    let found = all().into_iter().find(|candidate| candidate.name == check);
    let found = found.ok_or_else(|| Failed::from(format!("there is no check {check}")))?;
    match run_bounded(&Erased::new(harness), &found) {
        Ok(()) => Err(Failed::from("the check passes on a backend that breaks its sentence")),
        Err(failure) if failure.to_string().contains(expected) => Ok(()),
        Err(failure) => Err(Failed::from(format!(
            "the failure is {failure:?}, expected a text with {expected:?}"
        ))),
    }
}

fn passes(check: &str, harness: impl Harness) -> Result<(), Failed> {
    let found = all().into_iter().find(|candidate| candidate.name == check);
    let found = found.ok_or_else(|| Failed::from(format!("there is no check {check}")))?;
    run_bounded(&Erased::new(harness), &found).map_err(|failure| failure.to_string().into())
}

fn every_check_has_a_mutant(
    trials: &[Trial],
) -> impl FnOnce() -> Result<(), Failed> + Send + 'static {
    let names: Vec<String> = trials.iter().map(|trial| trial.name().to_owned()).collect();
    let has = move |check: &str| names.iter().any(|name| name.starts_with(&format!("{check}::")));
    move || {
        let checks = all();
        match checks.iter().find(|check| !has(check.name)) {
            None => Ok(()),
            Some(check) => Err(Failed::from(format!("{check:?} has no mutant that makes it fail"))),
        }
    }
}
