//! Sends from every rank to every rank in rounds, synchronized only by flags.
//!
//! In each round a rank signals its peers that they may write, puts its pattern into a slot of
//! each, signals, and overwrites the source as soon as the ticket is complete. The host checks the
//! received bytes in even rounds; the engine, with a copy to the own rank, in odd ones.

use peerlane_hal::Ticket;

use crate::data::{POISON, pattern, seed};
use crate::engine::{OpOf, TestEngine, put, signal};
use crate::failure::Outcome;
use crate::harness::Harness;
use crate::ranks::{Participant, Window};

/// Holds the memory of all rounds.
pub(super) struct Rounds<H: Harness> {
    /// One slot.
    source: Window<H>,
    /// A slot for each peer.
    landing: Window<H>,
    /// A slot that the engine copies received bytes to.
    copy: Window<H>,
    /// Two words for each peer: `ready` and `arrived`.
    flags: Window<H>,
    slot_bytes: u64,
}

/// Returns the word that permits `peer` to write.
fn ready(peer: usize) -> u64 {
    2 * peer as u64
}

/// Returns the word that announces the bytes of `peer`.
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

    /// Runs one round, counted from 1, of `bytes` to every rank.
    pub(super) fn round<'r>(
        &'r self,
        me: &Participant<'_, H>,
        engine: &mut TestEngine<'r, '_, H>,
        round: u64,
        bytes: u64,
    ) -> Outcome {
        let own = me.me as u64;
        me.write(&self.source.local, 0, &pattern(seed(me.me, round), bytes));
        let peers = || (0..me.ranks).map(|step| me.rank_after(step));
        let mut ops: Vec<OpOf<'r, H>> =
            peers().map(|peer| signal(&self.flags.remote[peer], ready(me.me), round)).collect();
        engine.submit_all(&ops)?;
        let mut last = Ticket::NONE;
        for peer in peers() {
            ops.clear();
            ops.extend(engine.wait_op(&self.flags.local, ready(peer), round)?);
            let slot = (&self.landing.remote[peer], own * self.slot_bytes);
            ops.push(put(slot, (&self.source.local, 0), bytes));
            ops.push(signal(&self.flags.remote[peer], arrived(me.me), round));
            last = engine.submit_all(&ops)?;
        }
        engine.finish(last)?;
        me.poison(&self.source.local, 0..bytes);
        peers().try_for_each(|peer| {
            self.check(me, engine, peer, round, bytes)
                .map_err(|failure| failure.within(format!("round {round}")))
        })
    }

    fn check<'r>(
        &'r self,
        me: &Participant<'_, H>,
        engine: &mut TestEngine<'r, '_, H>,
        peer: usize,
        round: u64,
        bytes: u64,
    ) -> Outcome {
        let what = format!("{bytes} bytes from rank {peer}");
        let expected = pattern(seed(peer, round), bytes);
        let slot = peer as u64 * self.slot_bytes;
        if !round.is_multiple_of(2) {
            let mut ops: Vec<_> =
                engine.wait_op(&self.flags.local, arrived(peer), round)?.into_iter().collect();
            let copy = (&self.copy.remote[me.me], 0);
            ops.push(put(copy, (&self.landing.local, slot), bytes));
            engine.run(&ops)?;
            me.ensure_bytes(&what, &self.copy.local, 0, &expected)?;
            me.poison(&self.copy.local, 0..bytes);
        } else {
            engine.wait_for_flag(&self.flags.local, arrived(peer), round)?;
            me.ensure_bytes(&what, &self.landing.local, slot, &expected)?;
        }
        me.write(&self.landing.local, slot, &vec![POISON; expected.len()]);
        Ok(())
    }
}
