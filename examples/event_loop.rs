//! Waits for operations in an event loop that polls file descriptors. Two ranks are threads of this process.
//!
//! `cargo run --example event_loop`

use std::os::fd::AsFd;

use peerlane::bootstrap::{Bootstrap, in_process};
use peerlane::{Error, Group, host};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::retry_on_intr;

const LEN: usize = 100_000;
const TICK: Timespec = Timespec { tv_sec: 10, tv_nsec: 0 };

fn serve(mut group: Group) -> Result<(), Error> {
    let rank = group.rank().0;
    let end = group.end()?;
    let mut weights = group.all_gather::<u32>(LEN).prepare()?;
    let mut tokens = group.all_to_all::<u32>(LEN).prepare()?;
    weights.input_mut()?.fill(rank);
    tokens.input_mut()?.fill(rank);
    // Owned, so that the loop can keep what is in flight in a list.
    let mut in_flight = vec![weights.into_started()?, tokens.into_started()?];
    while !in_flight.is_empty() {
        let mut watched = vec![PollFd::new(&end, PollFlags::IN)];
        let descriptors = in_flight.iter_mut().map(|started| started.descriptor());
        let descriptors = descriptors.collect::<Result<Vec<_>, Error>>()?;
        watched.extend(descriptors.iter().map(|own| PollFd::new(own, PollFlags::IN)));
        // A server adds its sockets here.
        retry_on_intr(|| poll(&mut watched, Some(&TICK))).expect("the descriptors are valid");
        end.check()?;
        let mut pending = Vec::new();
        for mut started in in_flight {
            if started.poll()? {
                let operation = started.wait()?;
                assert_eq!([operation.output()?[0], operation.output()?[LEN]], [0, 1]);
            } else {
                pending.push(started);
            }
        }
        in_flight = pending;
    }
    group.close()?;
    // The descriptor of the group stays readable.
    let watched = &mut [PollFd::from_borrowed_fd(end.as_fd(), PollFlags::IN)];
    assert_eq!(retry_on_intr(|| poll(watched, Some(&TICK))), Ok(1));
    Ok(())
}

fn main() -> Result<(), Error> {
    in_process::run(2, |bootstrap| {
        let fabric = host::Fabric::open(bootstrap.rank(), bootstrap.ranks())?;
        serve(Group::open(bootstrap, fabric)?)
    })?;
    Ok(())
}

#[test]
fn the_example_runs() {
    main().unwrap();
}
