//! What every SDMA engine holds of this queue.

use super::placement::{SdmaId, SdmaSet};
use super::stripe::{self, Candidate};

/// Copies that one engine holds, of all peers: a runtime with a full ring waits inside its call.
const HELD_MAX: usize = 32;

/// One engine.
#[derive(Clone, Copy, Debug)]
struct Load {
    /// `None`: whatever the runtime chooses.
    engine: Option<SdmaId>,
    copies: usize,
    bytes: u64,
}

/// By the number that [`Loads::taker`] gives.
#[derive(Debug, Default)]
pub(super) struct Loads(Vec<Load>);

impl Loads {
    /// The engine of a set that takes the next of `left` pieces of a copy, of which engines hold
    /// `held`, and the number of its load; `None` while all have enough.
    pub(super) fn taker(
        &mut self,
        set: SdmaSet,
        held: &[u8; SdmaId::COUNT],
        left: u64,
    ) -> Option<(usize, Option<SdmaId>)> {
        let choices = set.ids().map(Some).chain(set.is_empty().then_some(None));
        let mut candidates = [None; SdmaId::COUNT];
        let mut count = 0;
        for on in choices {
            let number = self.number(on);
            let Load { copies, bytes, .. } = self.0[number];
            let held = held[on.map_or(0, SdmaId::index)];
            // A full engine counts as one that has enough of this copy.
            let held = if copies < HELD_MAX { held } else { u8::MAX };
            candidates[count] = Some(Candidate { engine: (number, on), held, bytes });
            count += 1;
        }
        let candidates = candidates[..count].iter().map(|candidate| candidate.expect("counted"));
        stripe::taker(candidates, left)
    }

    fn number(&mut self, engine: Option<SdmaId>) -> usize {
        let known = self.0.iter().position(|load| load.engine == engine);
        known.unwrap_or_else(|| {
            self.0.push(Load { engine, copies: 0, bytes: 0 });
            self.0.len() - 1
        })
    }

    pub(super) fn put_on(&mut self, number: usize, bytes: u64) {
        self.0[number].copies += 1;
        self.0[number].bytes += bytes;
    }

    pub(super) fn take_off(&mut self, number: usize, bytes: u64) {
        self.0[number].copies -= 1;
        self.0[number].bytes -= bytes;
    }
}
