//! Names a group and its ranks in errors.

use peerlane_hal::Rank;

use crate::error::Error;

/// The name of a group and of its ranks in errors.
#[derive(Debug)]
pub(super) struct Identity {
    pub(super) label: Option<String>,
    /// The numbers of the ranks in the first group of the family.
    pub(super) first_ranks: Box<[Rank]>,
    /// Whether the group was not split from another one, so that its ranks need no other names.
    pub(super) is_first: bool,
}

impl Identity {
    /// Returns the number in the first group of a rank.
    pub(super) fn first(&self, rank: Rank) -> Rank {
        self.first_ranks[rank.index()]
    }

    /// Adds the name of the group to an error, and the number in the first group of the rank that the error is about.
    pub(super) fn name(&self, error: Error) -> Error {
        let Some(label) = &self.label else { return error };
        let peer =
            error.peer().filter(|peer| !self.is_first && peer.index() < self.first_ranks.len());
        let peer = peer.map(|peer| {
            let first = self.first(peer);
            format!("; rank {peer} of this group is rank {first} of the first one")
        });
        error.map_text(|text| format!("group \"{label}\": {text}{}", peer.unwrap_or_default()))
    }
}
