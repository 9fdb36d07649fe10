//! The threads that look after groups: how many there are, when they end, and what a forked child does with them.

use std::fs;
use std::sync::Barrier;
use std::time::{Duration, Instant};

use peerlane_collectives::bootstrap::environment::{Environment, HubAddress};
use peerlane_collectives::bootstrap::tcp::{Hub, TcpBootstrap};
use peerlane_collectives::bootstrap::{Bootstrap, in_process};
use peerlane_collectives::error::Error;
use peerlane_collectives::group::{Group, GroupOptions};
use peerlane_hal::{Deadline, Rank};
use peerlane_host as host;
use peerlane_test_support::ends_in_child;

use crate::support::group::in_group;
use crate::support::own_process::run_in_own_process;

const TIMEOUT: Duration = Duration::from_secs(20);

/// Returns how many threads of this process have a name that begins like this.
fn threads(name: &str) -> usize {
    let tasks = fs::read_dir("/proc/self/task").unwrap().flatten();
    let names = tasks.filter_map(|task| fs::read_to_string(task.path().join("comm")).ok());
    names.filter(|found| found.starts_with(name)).count()
}

/// Returns how many watchdogs and progress threads there are.
fn workers() -> (usize, usize) {
    (threads("peerlane-watch"), threads("peerlane-progre"))
}

/// Waits until there are so many watchdogs and progress threads.
///
/// A thread gets its name when it runs, and the kernel lists it until shortly after it was joined.
fn await_workers(expected: (usize, usize)) {
    let begun = Instant::now();
    while workers() != expected && begun.elapsed() < TIMEOUT {
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(workers(), expected);
}

/// Opens a group of one rank over TCP, whose ranks do not count as threads of one process.
fn open_alone(options: GroupOptions) -> Result<Group, Error> {
    let hub = HubAddress::RankZero("127.0.0.1:0".to_owned());
    let environment = Environment { hub, ..Environment::at_hub("", Rank(0), 1) };
    let bootstrap = TcpBootstrap::join(&environment, Deadline::after(TIMEOUT))?;
    options.open(bootstrap, host::Fabric::open(Rank(0), 1)?)
}

#[test]
fn groups_of_a_process_share_their_threads() {
    let test = "drivers::groups_of_a_process_share_their_threads";
    run_in_own_process(test, || {
        let alone = || open_alone(GroupOptions::default()).unwrap();
        await_workers((0, 0));

        // The threads live as long as any group, and there are others for the next one.
        for _ in 0..3 {
            let first = alone();
            await_workers((1, 0));
            let by_thread = open_alone(GroupOptions::default().progress_thread(true)).unwrap();
            let elsewhere = std::thread::spawn(alone).join().unwrap();
            await_workers((1, 1));

            first.close().unwrap();
            by_thread.close().unwrap();
            await_workers((1, 1));
            drop(elsewhere);
            await_workers((0, 0));
        }
    });
}

#[test]
fn ranks_that_are_threads_have_a_driver_each() {
    let test = "drivers::ranks_that_are_threads_have_a_driver_each";
    run_in_own_process(test, || {
        let together = Barrier::new(3);
        let in_process = |bootstrap: in_process::InProcessBootstrap| {
            let rank = bootstrap.rank();
            let world = Group::open(bootstrap, host::Fabric::open(rank, 3)?)?;
            together.wait();
            await_workers((3, 0));

            // Another group of the thread needs no others, whoever its ranks are.
            let other = open_alone(GroupOptions::default())?;
            together.wait();
            await_workers((3, 0));
            together.wait();
            other.close()?;
            world.close()
        };
        in_process::run(3, in_process).unwrap();
        await_workers((0, 0));

        let hub = Hub::bind("127.0.0.1:0", 3).unwrap();
        std::thread::scope(|scope| {
            for rank in 0..3 {
                let environment = Environment::at_hub(hub.address(), Rank(rank), 3);
                let together = &together;
                scope.spawn(move || {
                    let joined = TcpBootstrap::join(&environment, Deadline::after(TIMEOUT));
                    let fabric = host::Fabric::open(Rank(rank), 3).unwrap();
                    let group = Group::open(joined.unwrap(), fabric).unwrap();
                    together.wait();
                    await_workers((3, 0));
                    together.wait();
                    group.close().unwrap();
                });
            }
        });
        await_workers((0, 0));
    });
}

#[test]
fn a_forked_child_drops_its_copies_and_the_parent_goes_on() {
    let test = "drivers::a_forked_child_drops_its_copies_and_the_parent_goes_on";
    run_in_own_process(test, || {
        let mut group = open_alone(GroupOptions::default().progress_thread(true)).unwrap();
        let part = group.split(Some(0), 0).unwrap().unwrap();
        let window = group.window::<u32>(8).unwrap();
        let gather = group.all_gather::<u32>(8).prepare().unwrap();
        let mut copies = Some((gather, part, group));

        for _ in 0..3 {
            let (gather, _, group) = copies.as_mut().unwrap();
            let mut channel = Some(group.channel(&window, 1).unwrap());
            gather.run().unwrap();

            let is_ended = ends_in_child(|| {
                drop((channel.take(), copies.take()));
                // A group of the child has threads of its own.
                in_group(2, |own| own.all_gather::<u32>(8).prepare()?.run());
                await_workers((0, 0));
            });
            assert!(is_ended);

            let (gather, _, group) = copies.as_mut().unwrap();
            gather.run().unwrap();
            group.close_channel(channel.unwrap()).unwrap();
        }

        let (gather, part, group) = copies.unwrap();
        drop(gather);
        part.close().unwrap();
        group.close().unwrap();
        await_workers((0, 0));
    });
}
