//! Groups that are opened, ended and opened again at one address.

use std::thread;
use std::time::Duration;

use fastrand::Rng;
use peerlane_collectives::bootstrap::environment::{Environment, HubAddress};
use peerlane_collectives::bootstrap::tcp::{Hub, TcpBootstrap};
use peerlane_collectives::error::Error;
use peerlane_collectives::group::{Group, GroupEnd, GroupState, Operation};
use peerlane_hal::{Deadline, Rank};
use peerlane_host as host;
use peerlane_test_support::ReservedPort;

/// What outlives the groups of a rank.
type Kept = Vec<(GroupEnd, Operation<u32>)>;

fn address_at(port: &ReservedPort) -> HubAddress {
    HubAddress::RankZero(port.address().to_string())
}

fn open(hub: &HubAddress, rank: Rank, ranks: usize) -> Result<Group, Error> {
    let environment = Environment { hub: hub.clone(), ..Environment::at_hub("", rank, ranks) };
    let bootstrap = TcpBootstrap::join(&environment, Deadline::after(Duration::from_secs(20)))?;
    Group::open(bootstrap, host::Fabric::open(rank, ranks)?)
}

/// Runs `body` on ranks that are threads, each with random numbers of its own.
fn on_ranks(ranks: usize, body: impl Fn(Rank, &mut Rng) + Sync) {
    thread::scope(|scope| {
        for rank in Rank::all(ranks) {
            let body = &body;
            scope.spawn(move || body(rank, &mut Rng::with_seed(u64::from(rank.0))));
        }
    });
}

fn pause(random: &mut Rng) {
    if random.u8(..4) == 0 {
        thread::sleep(Duration::from_micros(random.u64(..3000)));
    }
}

/// Opens a group, gathers over it, and closes it. The operation and the handle of the end stay.
fn open_and_close(hub: &HubAddress, rank: Rank, ranks: usize, kept: &mut Kept, random: &mut Rng) {
    let mut group = open(hub, rank, ranks).unwrap();
    let mut gather = group.all_gather::<u32>(1).prepare().unwrap();
    gather.input_mut().unwrap()[0] = rank.0;
    gather.run().unwrap();
    assert!(gather.output().unwrap().iter().copied().eq(0..ranks as u32));
    if kept.len() % 2 == 1 {
        group.barrier().unwrap();
    }
    let end = group.end().unwrap();
    pause(random);

    group.close().unwrap();
    assert_eq!(end.state(), GroupState::Closed);
    if kept.len() < 10 {
        kept.push((end, gather));
    }
}

#[test]
fn groups_open_and_close_again_and_again_at_one_port_with_ranks_of_any_speed() {
    for (ranks, rounds) in [(1, 5), (2, 100), (3, 25), (5, 10)] {
        let port = ReservedPort::new();
        let hub = address_at(&port);
        on_ranks(ranks, |rank, random| {
            let mut kept = Kept::new();
            for _ in 0..rounds {
                pause(random);
                open_and_close(&hub, rank, ranks, &mut kept, random);
            }
        });
    }
}

#[test]
fn a_hub_outside_of_the_group_serves_one_group_after_another() {
    let hub = Hub::bind("127.0.0.1:0", 3).unwrap();
    let address = HubAddress::External(hub.address().to_string());
    on_ranks(3, |rank, random| {
        let mut kept = Kept::new();
        for _ in 0..25 {
            pause(random);
            open_and_close(&address, rank, 3, &mut kept, random);
        }
    });
}

#[test]
fn ranks_open_a_group_again_after_one_has_lost_it() {
    let port = ReservedPort::new();
    let hub = address_at(&port);
    on_ranks(3, |rank, random| {
        for round in 0..20 {
            let mut group = open(&hub, rank, 3).unwrap();
            let end = group.end().unwrap();
            group.exchange(&[]).unwrap();

            // A rank drops its group, which is the end for the others. They look for it in no order.
            if rank.0 != round % 3 {
                let error = group.barrier().unwrap_err();
                assert_eq!(error.peer(), Some(Rank(round % 3)), "round {round}: {error}");
                pause(random);
            }
            drop(group);
            assert_eq!(end.state(), GroupState::Ended);
        }
    });
}

#[test]
fn a_rank_that_is_early_waits_for_one_that_has_still_to_leave() {
    let port = ReservedPort::new();
    let hub = address_at(&port);
    on_ranks(2, |rank, _| {
        let group = open(&hub, rank, 2).unwrap();
        let end = group.end().unwrap();
        let closed = thread::spawn(|| group.close());
        if rank.0 == 0 {
            // Rank 1 has asked for the next group by then, unless the machine is busy.
            thread::sleep(Duration::from_millis(100));
        }
        closed.join().unwrap().unwrap();
        assert_eq!(end.state(), GroupState::Closed);
        open(&hub, rank, 2).unwrap().close().unwrap();
    });
}
