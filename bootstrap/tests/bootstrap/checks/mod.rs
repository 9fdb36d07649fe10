//! What every bootstrap must do: `in_process.rs` and `tcp.rs` run the whole list, each over its own.

pub(crate) mod endings;
pub(crate) mod exchanges;
pub(crate) mod shrinking;
pub(crate) mod subgroups;

use std::any::Any;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use peerlane_bootstrap::error::Error;
use peerlane_bootstrap::{Bootstrap, Listener, Notice};
use peerlane_hal::{Deadline, Rank};
use peerlane_test_support::Stopwatch;

pub(crate) type Handle = Box<dyn Bootstrap>;

/// An open group, with whatever must outlive its ranks.
pub(crate) struct Opened {
    pub(crate) ranks: Vec<Handle>,
    pub(crate) keep: Box<dyn Any>,
}

/// Opens a group of that many ranks.
pub(crate) type Open = fn(usize) -> Opened;

/// Long enough to be reached only by a failure.
pub(crate) fn long() -> Deadline {
    Deadline::after(Duration::from_secs(60))
}

/// How long anything may take that does not wait for a deadline.
pub(crate) const AT_ONCE: Duration = Duration::from_secs(1);
/// How much later than its deadline a call may return.
pub(crate) const LATE_MAX: Duration = Duration::from_millis(500);

/// Runs `body` as every rank at once; results in rank order.
pub(crate) fn each<R: Send>(ranks: &[Handle], body: impl Fn(&dyn Bootstrap) -> R + Sync) -> Vec<R> {
    thread::scope(|scope| {
        let body = &body;
        let threads: Vec<_> =
            ranks.iter().map(|rank| scope.spawn(move || body(rank.as_ref()))).collect();
        threads.into_iter().map(|thread| thread.join().expect("a rank panicked")).collect()
    })
}

/// Collects the notices of a rank from now on.
pub(crate) fn hear(rank: &dyn Bootstrap) -> Receiver<Notice> {
    let (sender, heard) = channel();
    rank.listen(Arc::new(Collector(Mutex::new(sender))));
    heard
}

/// Collects notices, and leaves it to other ranks to end the group.
struct Collector(Mutex<Sender<Notice>>);

impl Listener for Collector {
    fn notice(&self, notice: Notice) {
        let _ = self.0.lock().unwrap().send(notice);
    }

    fn exchange_timed_out(&self, _missing: &[Rank], error: Error) -> Error {
        error
    }
}

/// Returns the next notices of a rank, which it must hear soon.
pub(crate) fn next(heard: &Receiver<Notice>, count: usize) -> Vec<Notice> {
    let watch = Stopwatch::start();
    let next = || heard.recv_timeout(long().remaining()).expect("a notice is missing");
    let notices = (0..count).map(|_| next()).collect();
    watch.assert_within(AT_ONCE);
    notices
}

/// Checks that a rank soon hears of a loss, and that it is the only cause it hears of.
pub(crate) fn assert_hears_loss(heard: &Receiver<Notice>, lost: Rank) {
    match &next(heard, 2)[..] {
        [Notice::Lost { rank, .. }, Notice::Acknowledged] if *rank == lost => {}
        other => panic!("expected the loss of rank {lost}, heard {other:?}"),
    }
}

/// Makes a test of every check, over the groups that `$open` opens.
macro_rules! run_all {
    ($open:expr) => {
        crate::checks::run_all!($open, exchanges:
            every_rank_gets_what_every_rank_gave,
            exchanges_one_after_another_do_not_mix,
            labels_that_differ_are_a_mismatch_on_every_rank,
            what_is_too_long_is_refused,
            a_rank_that_never_comes_is_named,
            a_deadline_that_has_passed_is_a_timeout,
            hosts_agree,
        );
        crate::checks::run_all!($open, endings:
            a_loss_before_an_exchange_is_told,
            a_loss_ends_an_exchange_at_once,
            what_was_complete_before_a_loss_stays_complete,
            the_first_of_two_aborts_is_heard_by_all,
            an_abort_ends_an_exchange_at_once,
            notices_wait_for_a_listener,
            a_goodbye_is_no_loss,
            nothing_follows_a_goodbye,
            a_goodbye_after_an_abort_succeeds,
        );
        crate::checks::run_all!($open, shrinking:
            the_ranks_that_are_left_find_each_other,
            a_group_that_has_shrunk_can_shrink_again,
            an_excluded_rank_is_not_waited_for,
            a_rank_that_comes_late_is_left_out_and_told,
            an_attempt_can_be_repeated,
        );
        crate::checks::run_all!($open, subgroups:
            a_subgroup_exchanges_among_its_ranks,
            messages_before_a_subgroup_is_open_arrive,
            the_end_of_a_subgroup_is_not_that_of_another,
            a_lost_rank_is_lost_by_its_subgroups,
            a_subgroup_that_is_dropped_is_lost_by_its_ranks,
            a_goodbye_to_a_subgroup_is_no_loss,
        );
    };
    ($open:expr, $topic:ident: $($check:ident),* $(,)?) => {
        $(#[test]
        fn $check() {
            // The list runs more than once in this program.
            insta::allow_duplicates!(crate::checks::$topic::$check($open));
        })*
    };
}

pub(crate) use run_all;
