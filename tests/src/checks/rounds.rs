//! Everybody sends to everybody, round after round, with no synchronisation but the flags.
//!
//! In each round a rank tells its peers that they may write, puts its pattern into a slot of each,
//! signals, and overwrites the source as soon as the ticket is complete. What arrives is looked at by
//! the host in even rounds and by the engine, as a copy to itself, in odd ones.

use peerlane_hal::Ticket;

use crate::data::{POISON, pattern, seed};
use crate::driver::{Driver, OpOf, put, signal};
use crate::failure::Outcome;
use crate::harness::Harness;
use crate::world::{Participant, Window};

pub(super) struct Rounds<H: Harness> {
    /// One slot.
    source: Window<H>,
    /// A slot for each peer.
    landing: Window<H>,
    /// A slot for the engine's look.
    copy: Window<H>,
    /// Two words for each peer: it may be written to, and it has written.
    flags: Window<H>,
    slot_bytes: u64,
}

fn ready(peer: usize) -> u64 {
    2 * peer as u64
}

fn arrived(peer: usize) -> u64 {
    2 * peer as u64 + 1
}

impl<H: Harness> Rounds<H> {
    pub(super) fn open(me: &mut Participant<'_, H>, slot_bytes: u64) -> Outcome<Self> {
        Ok(Self {
            source: me.bytes(slot_bytes)?,
            landing: me.bytes(slot_bytes * me.ranks as u64)?,
            copy: me.bytes(slot_bytes)?,
            flags: me.flags(2 * me.ranks as u64)?,
            slot_bytes,
        })
    }

    /// One round, from 1, of `bytes` to everybody.
    pub(super) fn round<'r>(
        &'r self,
        me: &Participant<'_, H>,
        driver: &mut Driver<'r, '_, H>,
        round: u64,
        bytes: u64,
    ) -> Outcome {
        let own = me.me as u64;
        me.write(&self.source.local, 0, &pattern(seed(me.me, round), bytes));
        let peers = || (0..me.ranks).map(|step| me.after(step));
        let mut ops: Vec<OpOf<'r, H>> =
            peers().map(|peer| signal(&self.flags.remote[peer], ready(me.me), round)).collect();
        driver.submit_all(&ops)?;
        let mut last = Ticket::NONE;
        for peer in peers() {
            ops.clear();
            ops.extend(driver.hold(&self.flags.local, ready(peer), round)?);
            let slot = (&self.landing.remote[peer], own * self.slot_bytes);
            ops.push(put(slot, (&self.source.local, 0), bytes));
            ops.push(signal(&self.flags.remote[peer], arrived(me.me), round));
            last = driver.submit_all(&ops)?;
        }
        driver.finish(last)?;
        me.poison(&self.source.local, 0..bytes);
        peers().try_for_each(|peer| {
            self.look(me, driver, peer, round, bytes)
                .map_err(|failure| failure.within(format!("round {round}")))
        })
    }

    fn look<'r>(
        &'r self,
        me: &Participant<'_, H>,
        driver: &mut Driver<'r, '_, H>,
        peer: usize,
        round: u64,
        bytes: u64,
    ) -> Outcome {
        let what = format!("{bytes} bytes from rank {peer}");
        let wanted = pattern(seed(peer, round), bytes);
        let slot = peer as u64 * self.slot_bytes;
        if !round.is_multiple_of(2) {
            let mut ops: Vec<_> =
                driver.hold(&self.flags.local, arrived(peer), round)?.into_iter().collect();
            let copy = (&self.copy.remote[me.me], 0);
            ops.push(put(copy, (&self.landing.local, slot), bytes));
            driver.run(&ops)?;
            me.ensure_bytes(&what, &self.copy.local, 0, &wanted)?;
            me.poison(&self.copy.local, 0..bytes);
        } else {
            driver.reach(&self.flags.local, arrived(peer), round)?;
            me.ensure_bytes(&what, &self.landing.local, slot, &wanted)?;
        }
        me.write(&self.landing.local, slot, &vec![POISON; wanted.len()]);
        Ok(())
    }
}
