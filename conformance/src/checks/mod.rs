//! Checks of `hal/CONTRACT.md`: one module for each section, and one public function for each sentence in bold.
//!
//! Lanes and streams have no bold sentence: what the contract says about them binds the executor.

pub mod all_or_nothing;
pub mod arrival;
pub mod completion;
pub mod dependencies;
pub mod failure;
pub mod gets;
pub mod limits;
pub mod order;
pub mod polling;
pub mod reductions;
pub mod release;
mod rounds;
pub mod wait;

use std::fmt;
use std::ops::ControlFlow;

use peerlane_hal::{Caps, CopyEngine, Error, ErrorKind, Fabric, Rank};

use crate::failure::{Failure, Outcome};
use crate::harness::{EngineOf, ErrorOf, Harness};

/// Names an ability that a check needs in addition to the four traits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Need {
    /// Waits can be queued.
    QueuedWait,
    /// The engine makes progress only when it is polled.
    Polled,
    /// The harness can break an engine.
    BreakEngine,
    /// The engine runs reductions.
    Reduces,
}

/// A sentence of the contract with the function that checks it.
pub struct Check<H: Harness> {
    /// The section of the contract.
    pub topic: &'static str,
    /// The sentence in snake case.
    pub name: &'static str,
    /// The abilities without which the check is skipped.
    pub needs: &'static [Need],
    /// Runs the check.
    pub run: fn(&H) -> Outcome,
}

impl<H: Harness> fmt::Debug for Check<H> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}::{}", self.topic, self.name)
    }
}

impl<H: Harness> Check<H> {
    /// Names the sentence of the contract that does not hold, in front of the check's failure.
    pub(crate) fn broken(&self, failure: Failure) -> Failure {
        let sentence = self.name.replace('_', " ");
        failure.within(format!(
            "the backend breaks the contract, section {}, \"{sentence}\"",
            self.topic
        ))
    }
}

macro_rules! checks {
    ($($topic:ident :: $name:ident [$($need:ident),*];)*) => {
        /// Returns all checks, in the order of the contract.
        pub fn all<H: Harness>() -> Vec<Check<H>> {
            vec![$(Check {
                topic: stringify!($topic),
                name: stringify!($name),
                needs: &[$(Need::$need),*],
                run: $topic::$name::<H>,
            }),*]
        }
    };
}

checks! {
    order::ops_to_one_peer_take_effect_in_submission_order [];
    order::bytes_put_before_a_signal_are_readable_when_the_flag_is_seen [];
    order::a_signal_to_oneself_takes_effect_after_everything_before_it_is_complete [];
    order::a_signal_stores_all_64_bits_at_once [];
    wait::a_wait_holds_everything_behind_it_until_the_flag_is_reached [QueuedWait];
    wait::a_wait_acquires_what_any_writer_published [QueuedWait];
    wait::the_reset_of_a_wait_takes_effect_before_anything_behind_it [QueuedWait];
    wait::a_blocked_engine_does_not_hold_the_others [QueuedWait];
    arrival::no_flag_is_seen_before_the_flush_of_the_bytes_it_announces [];
    completion::a_completed_ticket_frees_its_sources [];
    completion::a_completed_put_to_oneself_is_visible_here [];
    completion::completion_is_monotone [];
    completion::an_empty_slice_gets_a_ticket [];
    all_or_nothing::a_full_queue_takes_nothing_of_a_slice [];
    all_or_nothing::a_slice_within_the_limit_fits_an_empty_queue [];
    release::release_lets_every_queued_wait_pass_within_a_bound [QueuedWait];
    release::a_released_engine_drains_and_takes_no_more [];
    limits::a_put_of_any_length_arrives_whole [];
    limits::a_put_at_any_aligned_offset_writes_only_its_own_bytes [];
    limits::a_slice_of_exactly_the_limit_is_taken [];
    limits::a_span_outside_its_region_is_refused [];
    failure::the_first_error_poisons_the_engine [BreakEngine];
    failure::malformed_keys_are_refused [];
    failure::a_key_survives_encoding [];
    failure::the_key_of_freed_memory_is_refused [];
    failure::malformed_addresses_are_refused [];
    failure::dropping_an_engine_with_a_blocked_wait_returns [QueuedWait];
    dependencies::flags_of_one_region_do_not_disturb_each_other [];
    dependencies::ones_own_key_gives_an_alias [];
    dependencies::what_one_fabric_allocated_another_can_register [];
    dependencies::a_region_tells_what_its_flags_hold [];
    dependencies::allocated_memory_is_zeroed [];
    dependencies::memory_of_another_device_is_refused [];
    dependencies::memory_of_a_rank_that_is_not_connected_cannot_be_imported [];
    dependencies::memory_that_is_reused_is_zeroed [];
    dependencies::a_fabric_opens_again_as_another_rank [];
    polling::a_polled_engine_moves_when_it_is_polled [Polled];
    polling::park_returns_when_a_flag_of_this_rank_is_signalled [];
    polling::an_idle_or_blocked_engine_is_not_busy [];
    polling::park_returns_when_the_waker_is_used [];
    polling::park_returns_at_its_limit [];
    gets::a_get_copies_exactly_its_bytes [];
    gets::gets_and_puts_with_one_peer_take_effect_in_submission_order [];
    gets::a_signal_to_a_peer_comes_after_the_gets_from_it [];
    gets::a_signal_to_oneself_announces_the_gets_before_it [];
    gets::a_completed_get_is_visible_here [];
    gets::a_get_from_oneself_is_a_local_copy [];
    gets::a_get_behind_a_wait_sees_what_the_wait_acquired [QueuedWait];
    gets::a_get_outside_its_regions_is_refused [];
    reductions::a_reduction_combines_its_sources_in_their_order [Reduces];
    reductions::a_reduction_follows_the_copies_to_oneself_before_it [Reduces];
    reductions::a_put_behind_a_reduction_sends_its_result [Reduces, QueuedWait];
    reductions::a_reduction_that_cannot_run_is_refused [Reduces];
}

/// Holds what a harness can do; determined before its checks are listed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Abilities {
    caps: Caps,
    break_engine: bool,
    reduces: bool,
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
        Ok(Self { caps, break_engine: harness.break_engine(&mut engine).is_some(), reduces })
    }

    /// Returns why a check with these needs is skipped, or `None` if it can run.
    pub fn missing(&self, needs: &[Need]) -> Option<&'static str> {
        let missing = needs.iter().try_for_each(|need| {
            let (has, reason) = match need {
                Need::QueuedWait => {
                    (self.caps.queued_wait, "the engine has no queued_wait: the executor polls")
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
