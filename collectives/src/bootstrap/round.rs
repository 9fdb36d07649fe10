//! One exchange, as one rank gathers it from what the exchange point passes on.

use peerlane_hal::{ErrorKind, Rank};

use crate::error::Error;

pub(super) struct Round {
    pieces: Vec<Option<Vec<u8>>>,
    missing: usize,
    /// Who came first, and with which label.
    first: Option<(Rank, String)>,
    mismatch: Option<Error>,
}

impl Round {
    pub(super) fn new(ranks: usize) -> Self {
        Self { pieces: vec![None; ranks], missing: ranks, first: None, mismatch: None }
    }

    /// Takes the piece of `from`. All ranks see all pieces in one order, so all find the same two
    /// ranks if labels differ.
    pub(super) fn take(&mut self, sequence: u64, from: Rank, label: String, blob: Vec<u8>) {
        let (first, expected) = self.first.get_or_insert_with(|| (from, label.clone()));
        if *expected != label && self.mismatch.is_none() {
            let mut sides = [(*first, expected.as_str()), (from, label.as_str())];
            sides.sort();
            let [(low, low_label), (high, high_label)] = sides;
            let text = format!(
                "exchange number {sequence}: rank {low} is at {low_label:?} while rank {high} is at \
                 {high_label:?}: all ranks must make the same collective calls in the same order"
            );
            self.mismatch = Some(Error::new(ErrorKind::Mismatch, text).with_peer(from));
        }
        let piece = &mut self.pieces[from.index()];
        if piece.is_none() {
            self.missing -= 1;
        }
        *piece = Some(blob);
    }

    /// What came of it, once that is settled; leaves the round empty then.
    pub(super) fn outcome(&mut self) -> Option<Result<Vec<Vec<u8>>, Error>> {
        if let Some(error) = self.mismatch.take() {
            return Some(Err(error));
        }
        (self.missing == 0).then(|| Ok(self.pieces.iter_mut().filter_map(Option::take).collect()))
    }

    /// Whose piece has not come.
    pub(super) fn missing(&self) -> impl Iterator<Item = Rank> {
        Rank::all(self.pieces.len()).filter(|rank| self.pieces[rank.index()].is_none())
    }
}
