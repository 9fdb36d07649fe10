//! Counts what messages of a channel allocate, with their tickets and waits for one of several
//! events.

use std::time::Duration;

use libtest_mimic::Failed;
use peerlane_collectives::bootstrap::{Bootstrap, in_process};
use peerlane_collectives::error::Error;
use peerlane_collectives::group::{Channel, ChannelEvent, Group};
use peerlane_hal::Rank;
use peerlane_host as host;

use super::{STARTS, WARM_UP, count};

const LEN: usize = 1000;
const SOON: Duration = Duration::from_secs(20);

pub(super) fn allocates_nothing(ranks: usize) -> Result<(), Failed> {
    count(ranks, warm, |channel| repeat(channel, STARTS))
}

fn warm(bootstrap: in_process::InProcessBootstrap) -> Result<(Group, Channel<i64>), Error> {
    let fabric = host::Fabric::open(bootstrap.rank(), bootstrap.ranks())?;
    let mut group = Group::open(bootstrap, fabric)?;
    let window = group.window(2 * LEN)?;
    let mut channel = group.channel(&window, 2)?;
    repeat(&mut channel, WARM_UP)?;
    Ok((group, channel))
}

/// Writes, puts to the next rank, and waits for the put to arrive from the rank before, for the
/// ticket of the own put, and until the next rank allows another put.
fn repeat(channel: &mut Channel<i64>, starts: u32) -> Result<(), Error> {
    let ranks = channel.ranks() as u32;
    let me = channel.rank().0;
    let next = Rank((me + 1) % ranks);
    let before = Rank((me + ranks - 1) % ranks);

    for start in 0..starts {
        channel.write(0, &[i64::from(start); LEN])?;
        let ticket = channel.put_signal(next, 0..LEN, LEN, 0)?;

        let arrived = channel.next_signal(before, 0);
        let allowed = channel.next_signal(next, 1);
        let mut open = [arrived, allowed, ticket.into()];
        let mut left = open.len();
        while left > 0 {
            let found = channel.wait_any(&open[..left], SOON)?;
            if open[found] == arrived {
                let mut last = [0];
                channel.read(2 * LEN - 1, &mut last)?;
                assert_eq!(last, [i64::from(start)]);
                channel.signal(before, 1)?;
            }
            left -= 1;
            open.swap(found, left);
        }
        assert!(channel.poll(ChannelEvent::Message(ticket))?);
    }
    Ok(())
}
