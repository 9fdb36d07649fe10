//! Tests faults of RDMA at the level of the four traits; ranks are fabrics of this process.
//!
//! Without a device only the tests that need none run.

mod keys;
mod limits;
mod links;
mod opening;
mod pair;
mod queues;

use std::process::ExitCode;

use libtest_mimic::{Arguments, Failed, Trial};
use peerlane_hal::{Error as _, ErrorKind, Rank};
use peerlane_rdma::Fabric;
use peerlane_tests::Outcome;

/// What a test needs in addition to the library.
#[derive(Clone, Copy)]
enum Needs {
    Nothing,
    Device,
    /// A network namespace with a device, which the test may change.
    Namespace,
}

fn main() -> ExitCode {
    let mut arguments = Arguments::from_args();
    // Some take a link down, or slow it.
    arguments.test_threads.get_or_insert(1);
    let absent = Fabric::open_with(Rank(0), 1, pair::options(0)).err();
    let absent = absent.filter(|error| error.kind() == ErrorKind::Unavailable);
    let no_device = absent.map(|error| error.to_string());
    let no_namespace = no_device.clone().or_else(|| match links::first_node() {
        Some(_) => None,
        None => Some("PEERLANE_TEST_RDMA_NAMESPACES names no network namespace".to_owned()),
    });
    match (&no_device, &no_namespace) {
        (Some(reason), _) => eprintln!("not covered: rdma_faults of devices: {reason}"),
        (None, Some(reason)) => eprintln!("not covered: rdma_faults of links: {reason}"),
        (None, None) => {}
    }
    let trial = |name: &str, needs: Needs, test: fn() -> Outcome| {
        let missing = match needs {
            Needs::Nothing => None,
            Needs::Device => no_device.as_ref(),
            Needs::Namespace => no_namespace.as_ref(),
        };
        Trial::test(format!("rdma_faults::{name}"), move || test().map_err(Failed::from))
            .with_ignored_flag(missing.is_some())
    };
    let trials = vec![
        trial("a_device_that_is_not_there_is_named", Needs::Nothing, opening::no_device),
        trial("a_wrong_port_or_address_is_named", Needs::Device, opening::wrong_place),
        trial("a_port_that_is_down_is_named", Needs::Namespace, opening::port_down),
        trial("memory_that_may_not_be_locked_is_refused", Needs::Device, limits::memory),
        trial("nobody_waits_for_queue_pairs_in_submit", Needs::Namespace, opening::slow_peer),
        trial("a_key_with_a_changed_field_is_refused", Needs::Device, keys::changed),
        trial("memory_freed_after_the_import_is_safe", Needs::Device, keys::freed),
        trial("a_peer_that_closed_is_lost", Needs::Device, queues::closed),
        trial("a_link_that_comes_back_loses_nothing", Needs::Namespace, links::flaps),
        trial("a_link_that_stays_down_is_named", Needs::Namespace, links::stays_down),
        trial("more_messages_than_places_all_arrive", Needs::Device, queues::overrun),
        trial("a_sleeper_hears_though_another_took_the_event", Needs::Device, queues::sleepers),
        trial(
            "copies_of_all_sizes_over_queue_pairs_keep_their_order",
            Needs::Device,
            queues::order,
        ),
        trial("engines_come_and_go_without_leaks", Needs::Device, limits::rounds),
    ];
    libtest_mimic::run(&arguments, trials).exit_code()
}
