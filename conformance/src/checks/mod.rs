//! Checks of `hal/CONTRACT.md`: one module for each section, and one public function for each
//! sentence in bold.
//!
//! Lanes and streams have no bold sentence: what the contract says about them binds the executor.

pub mod all_or_nothing;
pub mod arrival;
pub mod commands;
pub mod completion;
pub mod dependencies;
pub mod failure;
pub mod fused_starts;
pub mod gets;
pub mod limits;
pub mod offers;
pub mod order;
pub mod polling;
pub mod reductions;
pub mod release;
mod rounds;
pub mod rows;
pub mod wait;

use std::fmt;
use std::ops::ControlFlow;

use peerlane_hal::{Caps, CopyEngine, Error, ErrorKind, Fabric, Rank};

use crate::failure::{Failure, Outcome};
use crate::harness::erased::Erased;
use crate::harness::{EngineOf, ErrorOf, Harness};

/// Names an ability that a check needs in addition to the four traits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Need {
    /// Waits can be queued.
    QueuedWait,
    /// The engine gets.
    Gets,
    /// The engine copies rows.
    Rows,
    /// The engine has not all ops.
    LacksAnOp,
    /// The engine makes progress only when it is polled.
    Polled,
    /// The harness can break an engine.
    BreakEngine,
    /// The engine runs reductions.
    Reduces,
    /// Engines of some kind make fused starts.
    FusedStarts,
    /// Each engine has hardware queues of its own, or engines share so many that others go on while
    /// one is blocked.
    HardwareQueues,
}

/// A sentence of the contract with the function that checks it.
pub struct Check {
    /// The section of the contract.
    pub topic: &'static str,
    /// The sentence in snake case.
    pub name: &'static str,
    /// The abilities without which the check is skipped.
    pub needs: &'static [Need],
    /// What the author of a backend should look at first if the check fails: the usual cause in a
    /// new backend.
    pub next: &'static str,
    /// Runs the check.
    pub run: fn(&Erased) -> Outcome,
}

impl fmt::Debug for Check {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}::{}", self.topic, self.name)
    }
}

impl Check {
    /// Adds the sentence of the contract that does not hold, in front of the check's failure, and
    /// what to look at next behind it.
    pub(crate) fn broken(&self, failure: Failure) -> Failure {
        let sentence = self.name.replace('_', " ");
        let broken =
            format!("the backend breaks the contract, section {}, \"{sentence}\"", self.topic);
        failure.within(broken).followed_by(format!("next: {}", self.next))
    }
}

macro_rules! checks {
    ($($(<$typed:tt>)? $topic:ident :: $name:ident [$($need:ident),*] $next:literal;)*) => {
        /// Returns all checks, in the order of the contract.
        pub fn all() -> Vec<Check> {
            vec![$(Check {
                topic: stringify!($topic),
                name: stringify!($name),
                needs: &[$(Need::$need),*],
                next: $next,
                run: run!($($typed)? $topic::$name),
            }),*]
        }
    };
}

macro_rules! run {
    ($topic:ident :: $name:ident) => {
        $topic::$name::<Erased>
    };
    (typed $topic:ident :: $name:ident) => {
        |harness| harness.typed().$name()
    };
}

// Each check has its needs in brackets, and its `next`: one imperative sentence of at most 140
// characters. A `<typed>` check runs on the fabric with its types.
checks! {
    order::ops_to_one_peer_take_effect_in_submission_order []
        "Put all ops to one peer into one in-order queue in `submit`, or fence them if the device spreads copies over several.";
    order::bytes_put_before_a_signal_are_readable_when_the_flag_is_seen []
        "Store the flag of `Op::Signal` with release order, behind every piece of the puts before it.";
    order::a_signal_to_oneself_takes_effect_after_everything_before_it_is_complete []
        "Hold a signal to this rank in `submit` until the copies to all other peers are complete, also those of other queues.";
    order::a_signal_stores_all_64_bits_at_once []
        "Store the value of `Op::Signal` by one aligned 8-byte write, not by a copy of bytes or by two 4-byte writes.";
    wait::a_wait_holds_everything_behind_it_until_the_flag_is_reached [QueuedWait]
        "Let `Op::Wait` stop the ops to every peer of its engine but no other engine, and compare with `>=`, not with `==`.";
    wait::a_wait_acquires_what_any_writer_published [QueuedWait]
        "Load the flag of `Op::Wait` with acquire order and invalidate the caches of the device, or do not report `Caps::queued_wait`.";
    wait::the_reset_of_a_wait_takes_effect_before_anything_behind_it [QueuedWait]
        "Store the 0 of an `Op::Wait` with `reset` before the next op begins, because a late store erases the next signal.";
    wait::a_blocked_engine_does_not_hold_the_others [QueuedWait, HardwareQueues]
        "Give each engine its own hardware queue in `Fabric::engine`, or report in `Caps::shared_queues` how many they share.";
    arrival::no_flag_is_seen_before_the_flush_of_the_bytes_it_announces []
        "Flush the bytes before `Op::Signal` stores the flag if the two take different paths or a device cache can hold old bytes.";
    completion::a_completed_ticket_frees_its_sources []
        "Count a put in `completed` when the device has read its source, not when the device has only accepted the descriptor.";
    completion::a_completed_put_to_oneself_is_visible_here []
        "Count a put to this rank in `completed` when its bytes are written and visible to the host, not when its source was read.";
    completion::completion_is_monotone []
        "Number the slices from 1 in `submit` and return the minimum over the peers from `completed`, as `TicketCounter` does.";
    completion::an_empty_slice_gets_a_ticket []
        "Issue a ticket in `submit` even if `ops` is empty, and complete it after the tickets before it, not at once.";
    all_or_nothing::a_full_queue_takes_nothing_of_a_slice []
        "Check the room for the whole slice before `submit` queues its first op, and count the pieces of long puts as well.";
    all_or_nothing::a_slice_within_the_limit_fits_an_empty_queue []
        "Lower `Caps::slice_ops_max` to what an empty queue takes, or keep the ops that do not fit the ring in a backlog.";
    release::release_lets_every_queued_wait_pass_within_a_bound [QueuedWait]
        "End the wait on the device in `release`, not only in the state on the host, and touch no other engine of the device.";
    release::a_released_engine_drains_and_takes_no_more []
        "Call `EngineState::release` in `release`, and count the tickets of the ops that it drops as complete.";
    release::a_drained_engine_touches_no_memory []
        "Drop in `release` only what the device has not begun, and complete the last ticket when the device is idle.";
    limits::a_put_of_any_length_arrives_whole []
        "Split puts at `Caps::piece_bytes_max` with `pieces`, copy the rest to the byte, and keep length 0 from the device.";
    limits::a_put_at_any_aligned_offset_writes_only_its_own_bytes []
        "Report the alignment of the device in `Caps::put_align_bytes`, and do not round lengths up to whole words.";
    limits::a_slice_of_exactly_the_limit_is_taken []
        "Refuse a slice in `submit` only if its length is above `Caps::slice_ops_max`, and make the queue hold that many ops.";
    limits::a_span_outside_its_region_is_refused []
        "Call `EngineState::check_slice` before `submit` queues an op; an own check needs sums that cannot overflow.";
    limits::an_op_that_the_engine_lacks_is_refused [LacksAnOp]
        "Create `EngineState` with the same `Caps` that `caps` returns, and call `check_slice` before `submit` queues an op.";
    failure::the_first_error_poisons_the_engine [BreakEngine]
        "Keep the first error with `EngineState::keep`, and return it from `submit`, `completed`, `park` and `release`.";
    <typed> failure::malformed_keys_are_refused []
        "Bound every field and refuse trailing bytes in `RemoteKey::decode`, and compare the key with its registration in `import`.";
    <typed> failure::a_key_survives_encoding []
        "Read in `RemoteKey::decode` exactly the fields that `encode` writes, and give each registration its own generation.";
    failure::the_key_of_freed_memory_is_refused []
        "Find memory in `import` by the generation of the key, not by its address, and forget it when the region is dropped.";
    failure::malformed_addresses_are_refused []
        "Check magic, version, backend, rank and length of the address in `connect`, and return an error of kind `Mismatch`.";
    failure::dropping_an_engine_with_a_blocked_wait_returns [QueuedWait]
        "Do in `drop` what `release` does, before it joins a thread or waits for the device: the wait ends in no other way.";
    failure::a_dropped_engine_touches_no_memory []
        "Stop the queue of the device in `drop` and wait until it is idle, because copies in flight outlive a freed ring.";
    dependencies::flags_of_one_region_do_not_disturb_each_other []
        "Compute the address of a flag as 8 times `Flag::word` after the base, and write 8 bytes for a signal or a reset.";
    dependencies::ones_own_key_gives_an_alias []
        "Return from `import` of a key of this rank the same bytes, at their offset in the allocation, and free nothing on its drop.";
    dependencies::what_one_fabric_allocated_another_can_register []
        "Accept in `register` a part of memory that is registered already, at any offset, and use it in place instead of a copy.";
    dependencies::a_region_tells_what_its_flags_hold []
        "Copy the flag from the device in `Region::flag_value` if the host cannot load it, and check the role and the index.";
    dependencies::allocated_memory_is_zeroed []
        "Fill new memory with zeros in `allocate`, and wait for the end of the fill, because drivers return memory with old bytes.";
    dependencies::memory_of_no_bytes_is_memory []
        "Handle length 0 in `allocate`, `register` and `import` without the vendor's call, which often refuses it.";
    dependencies::memory_of_another_device_is_refused []
        "Take device memory in `adopt` only by `DynRegion::downcast` to a type of this backend, or by its `dma_buf`.";
    dependencies::memory_of_a_rank_that_is_not_connected_cannot_be_imported []
        "Require in `import` that the peer is connected, even if it is this rank, and do not take connections over in `reopen`.";
    dependencies::a_second_connection_to_a_peer_changes_nothing []
        "Return from `connect` without an effect if the peer is connected with this address, and keep its queues and mappings.";
    dependencies::an_engine_refuses_or_runs_ops_with_peers_that_were_connected_after_its_creation []
        "Refuse ops with peers that the engine does not reach with `PeerSet::peer_of`, before `submit` queues the first op.";
    dependencies::memory_that_is_reused_is_zeroed []
        "Return flags from `allocate_polled_flags` that the host can load, and fill memory that `allow_reuse` kept with zeros.";
    dependencies::a_fabric_opens_again_as_another_rank []
        "Share only the device in `reopen`, and make the rank, the address and the connections of the fabric new.";
    polling::a_polled_engine_moves_when_it_is_polled [Polled]
        "Advance the queue in every call of `completed`, not only in `submit`, and wait for no call of the peer.";
    polling::park_returns_when_a_flag_of_this_rank_is_signalled []
        "Announce the sleep in `park`, look at the flags once more and then sleep, or use `TimedParker` if the device sends no events.";
    polling::an_idle_or_blocked_engine_is_not_busy []
        "Return true from `is_busy` only if a call of `completed` can do more at once, not if the queue is not empty.";
    polling::park_returns_when_the_waker_is_used []
        "Store the use of the waker where `park` looks before it sleeps, as `Parker` does, because it can precede the sleep.";
    polling::park_returns_at_its_limit []
        "Pass the limit of `park` to the sleep, even if it is 0, and do not sleep in a call of the driver that has no timeout.";
    gets::a_get_copies_exactly_its_bytes [Gets]
        "Split gets at `Caps::piece_bytes_max` as puts, skip length 0, and report in `Caps::put_align_bytes` what reads need.";
    gets::gets_and_puts_with_one_peer_take_effect_in_submission_order [Gets]
        "Queue gets with the puts to that peer in `submit`, and fence the put after a get if writes can overtake reads.";
    gets::a_signal_to_a_peer_comes_after_the_gets_from_it [Gets]
        "Hold `Op::Signal` until the bytes of the gets from that peer are here, not only until the requests are sent.";
    gets::a_signal_to_oneself_announces_the_gets_before_it [Gets]
        "Include the gets from all peers in what `Op::Signal` to this rank waits for, not only the puts.";
    gets::a_completed_get_is_visible_here [Gets]
        "Count a get in `completed` when its bytes are written here, and make them visible to the host and other engines first.";
    gets::a_get_from_oneself_is_a_local_copy [Gets]
        "Let `Op::Get` accept what `import` returned for a key of this rank, and copy in the order of the queue.";
    gets::a_get_behind_a_wait_sees_what_the_wait_acquired [Gets, QueuedWait]
        "Send the read request of `Op::Get` when the wait before it has ended, not when `submit` is called.";
    gets::a_get_outside_its_regions_is_refused [Gets]
        "Check `Op::Get` with its local region as the destination and the remote one as the source, as `EngineState::check_slice` does.";
    reductions::a_reduction_combines_its_sources_in_their_order [Reduces]
        "Compare the kernel with `Reduction::run`: one source after the other, the same rounding, and no store behind the last element.";
    reductions::a_reduction_follows_the_copies_to_oneself_before_it [Reduces]
        "Start the kernel of `Op::Reduce` when the copies to this rank are complete, because they often run in another queue.";
    reductions::a_put_behind_a_reduction_sends_its_result [Reduces, QueuedWait]
        "Make the ops behind `Op::Reduce` wait for the end of its kernel, not for its launch, also those in other queues.";
    reductions::a_reduction_that_cannot_run_is_refused [Reduces]
        "Call `EngineState::set_reducer` in `prepare_reduce`, and `check_slice` and `check_elements` before `submit` queues an op.";
    rows::rows_arrive_at_their_pitch [Rows]
        "Pass `Rows::dst_pitch` and `src_pitch` to their sides of the device's 2D copy, and split where its limits end.";
    rows::a_copy_of_rows_keeps_its_place_in_the_order [Rows]
        "Let the op behind `Op::PutRows` wait for all rows if `submit` spreads them over several queues.";
    rows::rows_that_leave_their_region_or_overlap_are_refused [Rows]
        "Check the last row of `Rows` with sums that cannot overflow, and that of several rows none is longer than a pitch.";
    commands::a_command_runs_like_its_op []
        "Read offsets, flags and values from the ops of each `submit`, and keep nothing of the slice before.";
    commands::a_command_that_names_no_bound_region_is_refused []
        "Number the slices in `submit` alone: a slice that was refused above the engine never reaches it.";
    offers::an_engine_is_what_its_fabric_offers []
        "Build the `Caps` of `offers` and those of a new engine by one function, or from one constant.";
    offers::a_kind_that_is_not_offered_is_refused []
        "Call `EngineRequirements::select` with the offers of the fabric at the begin of `Fabric::engine`.";
    offers::an_engine_beside_compute_copies_no_more_by_compute_units []
        "Let `beside_compute` only move copies from compute units to copy engines or links, never the other way.";
    fused_starts::a_fused_start_has_the_effects_of_its_ops [FusedStarts]
        "Let a launch of `start` fence the stores of all threads of a block before its signal, and divide bytes by the length of an op alone.";
    fused_starts::tagged_data_is_read_when_it_has_arrived [FusedStarts]
        "Compare both tags of a word with the number of the start, and clear the slots before `compile` returns.";
    fused_starts::a_release_ends_fused_starts_that_wait [FusedStarts]
        "Look at a word of the host in every loop that polls, and set it in `release`.";
    fused_starts::ops_and_fused_starts_take_effect_in_their_order [FusedStarts]
        "Enqueue the launch of `start` behind what `submit` has enqueued, and let one count give tickets to both.";
    fused_starts::a_program_can_be_replaced_between_starts [FusedStarts]
        "Pass the program by value with each launch, so that `replace` only has to change the copy of the host.";
    fused_starts::signals_carry_the_digest_of_their_start [FusedStarts]
        "Shift the number of the start by `digest_bits`, and add the digest to what signals store, but not to what waits compare.";
    fused_starts::ops_that_no_launch_runs_are_refused [FusedStarts]
        "Check in `compile` the ops of even and odd starts, and the last word of each flag, before anything is launched.";
    fused_starts::blocks_that_do_not_fit_on_the_device_are_refused [FusedStarts]
        "Count the blocks of all engines of a device with `ReservedBlocks`, and give them back when an engine is dropped.";
}

/// The number of shared hardware queues for each engine that a check blocks: an engine has up to
/// three streams, and two ranks may share a device.
pub(crate) const QUEUES_A_BLOCKED_ENGINE: u32 = 8;

/// Holds what a harness can do; determined before its checks are listed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Abilities {
    caps: Caps,
    break_engine: bool,
    reduces: bool,
    fused: bool,
}

impl Abilities {
    /// Opens a fabric of one rank and reads its abilities.
    ///
    /// # Errors
    /// Those of the backend; of kind [`Unavailable`](ErrorKind::Unavailable) where it is absent.
    pub fn probe<H: Harness>(harness: &H) -> Result<Self, ErrorOf<H>> {
        let mut fabric = harness.open(Rank(0), 1)?;
        let deadline = peerlane_hal::Deadline::after(harness.timeout());
        let address = fabric.address();
        fabric.connect(Rank(0), &address, deadline)?;
        let mut engine: EngineOf<H> = fabric.engine(Default::default())?;
        let (caps, reduces) = (*engine.caps(), engine.prepare_reduce()?.is_some());
        let fused = fabric.offers()?.iter().any(|offer| offer.fused.is_some());
        let break_engine = harness.break_engine(&mut engine).is_some();
        Ok(Self { caps, break_engine, reduces, fused })
    }

    pub(crate) fn caps(&self) -> Caps {
        self.caps
    }

    /// Returns why a check with these needs is skipped, or `None` if it can run.
    pub fn missing(&self, needs: &[Need]) -> Option<&'static str> {
        let missing = needs.iter().try_for_each(|need| {
            let (has, reason) = match need {
                Need::QueuedWait => {
                    (self.caps.queued_wait, "the engine has no queued_wait: the executor polls")
                }
                Need::Gets => (self.caps.gets, "the engine has no gets: algorithms put instead"),
                Need::Rows => (self.caps.rows, "the engine has no rows: each row is a copy"),
                Need::LacksAnOp => {
                    let Caps { queued_wait, gets, rows, .. } = self.caps;
                    (!(queued_wait && gets && rows), "the engine has waits, gets and rows")
                }
                Need::Polled => {
                    (self.caps.polled, "the engine is not polled: it makes progress by itself")
                }
                Need::BreakEngine => {
                    (self.break_engine, "the harness has no method to break an engine")
                }
                Need::Reduces => {
                    (self.reduces, "prepare_reduce returns None: a thread of the caller adds")
                }
                Need::FusedStarts => {
                    (self.fused, "no kind of engines makes fused starts: engines take slices of ops")
                }
                Need::HardwareQueues => (
                    self.caps.shared_queues.is_none_or(|queues| queues.count >= QUEUES_A_BLOCKED_ENGINE),
                    "the engines share fewer than 8 hardware queues, so an engine that waits can block others",
                ),
            };
            if has { ControlFlow::Continue(()) } else { ControlFlow::Break(reason) }
        });

        missing.break_value()
    }
}

/// Returns whether the error only means that the backend is absent on this machine.
pub(crate) fn is_absent<E: Error>(error: &E) -> bool {
    error.kind() == ErrorKind::Unavailable
}
