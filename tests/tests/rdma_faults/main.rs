//! Tests faults of RDMA at the level of the four traits; ranks are fabrics of this process.
//!
//! Without a device only the tests that need none run.

mod keys;
mod limits;
mod links;
mod opening;
#[path = "../rdma_support/pair.rs"]
mod pair;
mod queues;

use std::process::ExitCode;

use libtest_mimic::{Arguments, Failed, Trial};
use peerlane_hal::{Error as _, ErrorKind, Rank};
use peerlane_rdma::Fabric;
use peerlane_tests::Outcome;

fn main() -> ExitCode {
    let mut arguments = Arguments::from_args();
    // Some take a link down, or slow it.
    arguments.test_threads.get_or_insert(1);
    let absent = Fabric::open_with(Rank(0), 1, pair::options(0)).err();
    let reason = absent.filter(|error| error.kind() == ErrorKind::Unavailable);
    if let Some(reason) = &reason {
        eprintln!("skipped: {reason}");
    }
    let trial = |name: &str, needs_device: bool, test: fn() -> Outcome| {
        Trial::test(format!("rdma_faults::{name}"), move || test().map_err(Failed::from))
            .with_ignored_flag(needs_device && reason.is_some())
    };
    let trials = vec![
        trial("a_device_that_is_not_there_is_named", false, opening::no_device),
        trial("a_wrong_port_or_address_is_named", true, opening::wrong_place),
        trial("a_port_that_is_down_is_named", true, opening::port_down),
        trial("memory_that_may_not_be_locked_is_refused", true, limits::memory),
        trial("nobody_waits_for_queue_pairs_in_submit", true, opening::slow_peer),
        trial("a_key_with_a_changed_field_is_refused", true, keys::changed),
        trial("memory_freed_after_the_import_is_safe", true, keys::freed),
        trial("a_peer_that_closed_is_lost", true, queues::closed),
        trial("a_link_that_comes_back_loses_nothing", true, links::flaps),
        trial("a_link_that_stays_down_is_named", true, links::stays_down),
        trial("more_messages_than_places_all_arrive", true, queues::overrun),
        trial("a_sleeper_hears_though_another_took_the_event", true, queues::sleepers),
        trial("copies_of_all_sizes_over_queue_pairs_keep_their_order", true, queues::order),
        trial("engines_come_and_go_without_leaks", true, limits::rounds),
    ];
    libtest_mimic::run(&arguments, trials).exit_code()
}
