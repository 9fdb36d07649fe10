//! Describes fused starts: how their data moves, with how many blocks, and what they cost.

use serde::Serialize;

use super::form::Form;
use crate::collective::Collective;
use crate::links::{Link, Links};

/// How the data of a fused start moves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Transfer {
    /// Data carries the number of its start, and is polled by its receiver. It needs no flags, but
    /// twice the bytes.
    Tagged,
    /// Data moves to where it is needed, and flags follow it.
    Direct,
}

impl Transfer {
    /// Both kinds of transfers.
    pub const ALL: [Self; 2] = [Self::Tagged, Self::Direct];

    /// Returns the name of the transfer for tables.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Tagged => "tagged",
            Self::Direct => "direct",
        }
    }

    /// Returns whether starts are fused so, if a rank puts or adds `bytes` bytes for each peer,
    /// with at most `most` blocks.
    ///
    /// A thread handles one word of tagged data. A second one would wait for the first.
    pub fn suits(self, bytes: u64, most: u32) -> bool {
        self == Self::Direct || bytes <= TAGGED_BLOCK_BYTES * u64::from(most.min(BLOCKS_MAX))
    }

    /// Returns a number of blocks of threads that makes a start about as fast as any number up to
    /// `most` does, if a rank puts or adds `bytes` bytes for each peer.
    ///
    /// The number is a power of two, or `most`. It depends on values that are equal on all ranks.
    pub fn blocks(self, form: Option<Form>, bytes: u64, most: u32) -> u32 {
        let (least, bytes_of_block) = match (self, form) {
            (Self::Tagged, _) => (1, TAGGED_BLOCK_BYTES),
            // Every rank adds everything.
            (Self::Direct, Some(Form::Whole)) => (DIRECT_BLOCKS_MIN, DIRECT_BLOCK_BYTES / 2),
            (Self::Direct, _) => (DIRECT_BLOCKS_MIN, DIRECT_BLOCK_BYTES),
        };
        let is_long = form == Some(Form::InParts) && bytes >= LONG_PART_BYTES;
        let limit = if is_long { LONG_BLOCKS_MAX } else { BLOCKS_MAX };

        let blocks = bytes.div_ceil(bytes_of_block).max(1).checked_next_power_of_two();
        let blocks = blocks.unwrap_or(u64::MAX).min(limit.into()) as u32;
        blocks.max(least).min(most.max(1))
    }
}

// The figures below predict the times of fused starts in docs/perf/beside-nccl.md.

/// More blocks make starts at most 2 % faster, and leave less room for other operations.
const BLOCKS_MAX: u32 = 64;
/// The same for parts of at least so many bytes, whose additions more blocks make 5 % faster.
const LONG_BLOCKS_MAX: u32 = 128;
const LONG_PART_BYTES: u64 = 16 << 20;
/// The number of bytes of a block of a tagged start: one word for each thread.
const TAGGED_BLOCK_BYTES: u64 = 4 << 10;
/// The least number of blocks of a direct start, and the number of bytes of a block.
const DIRECT_BLOCKS_MIN: u32 = 16;
const DIRECT_BLOCK_BYTES: u64 = 32 << 10;

/// The time of a launch, and of its end.
const LAUNCH_SECONDS: f64 = 2.4e-6;
/// The time from a signal until the blocks that wait for it go on.
const FLAG_SECONDS: f64 = 2.5e-6;
/// The time after which the threads go on with the next peer.
const PEER_SECONDS: f64 = 0.3e-6;
/// The time from the arrival of tagged data until a thread that polls has it.
const POLL_SECONDS: f64 = 0.2e-6;
/// The rate at which one block stores to peers.
const BLOCK_BYTES_PER_SECOND: f64 = 24e9;
/// The rate of additions, compared with that of copies inside a device: of data in inboxes, and of
/// data that threads add while others still store to peers.
const ADDITION_RATES: [f64; 2] = [0.7, 4.0];
/// The share of the rate of copy engines that the stores of many blocks reach.
const STORE_SHARE: f64 = 0.88;
/// How much longer tagged data is, with what its reader needs to look at the tags.
const TAGGED_LENGTH: f64 = 2.2;

impl Links {
    /// Returns the links of starts that are one launch of so many blocks, on devices whose copy
    /// engines have these links.
    #[must_use]
    pub fn of_launches(&self, transfer: Transfer, collective: Collective, blocks: u32) -> Self {
        let of_blocks = BLOCK_BYTES_PER_SECOND * f64::from(blocks.max(1));
        let (flag_seconds, longer) = match transfer {
            // The data is its own flag.
            Transfer::Tagged => (POLL_SECONDS, TAGGED_LENGTH),
            Transfer::Direct => (FLAG_SECONDS, 1.0),
        };

        let rate = |of_engines: f64| (of_engines * STORE_SHARE).min(of_blocks) / longer;
        let of_threads = |link: &Link| Link {
            put_seconds: PEER_SECONDS,
            get_seconds: PEER_SECONDS,
            flag_seconds,
            step_seconds: 0.0,
            submit_seconds: 0.0,
            bytes_per_second: rate(link.bytes_per_second),
            get_bytes_per_second: None,
            engine_bytes_per_second: rate(link.engine_bytes_per_second),
            send_bytes_per_second: rate(link.send_bytes_per_second),
            receive_bytes_per_second: rate(link.receive_bytes_per_second),
            puts_in_flight: 1,
            ..link.clone()
        };
        let own = of_threads(&self.own);
        let [in_inbox, on_the_way] = ADDITION_RATES;
        // Results that go to peers are added while other blocks still wait for contributions.
        let adds_last = collective.is_reduction() && collective != Collective::AllReduce;
        let is_last = transfer == Transfer::Direct && adds_last;
        let added = self.own.bytes_per_second * if is_last { in_inbox } else { on_the_way };
        let own = Link {
            bytes_per_second: added,
            engine_bytes_per_second: added,
            send_bytes_per_second: added,
            receive_bytes_per_second: added,
            ..own
        };
        Self {
            own,
            local: of_threads(&self.local),
            start_seconds: LAUNCH_SECONDS,
            residuals: Vec::new(),
            ..self.clone()
        }
    }
}

#[cfg(test)]
mod tests {
    use peerlane_hal::LinkKind;

    use super::*;

    #[test]
    fn longer_starts_have_more_blocks_up_to_the_limit() {
        let of = |transfer: Transfer, bytes| transfer.blocks(None, bytes, 64);
        assert_eq!([0, 1, 5000, 1 << 20].map(|bytes| of(Transfer::Tagged, bytes)), [1, 1, 2, 64]);
        assert_eq!([0, 1 << 19, 1 << 30].map(|bytes| of(Transfer::Direct, bytes)), [16, 16, 64]);
        assert!(
            Transfer::Tagged.suits(256 << 10, 128) && !Transfer::Tagged.suits(1 + (256 << 10), 128)
        );
        assert!(!Transfer::Tagged.suits(8193, 2) && Transfer::Direct.suits(u64::MAX, 1));
        assert_eq!(Transfer::Direct.blocks(None, u64::MAX, 6), 6);
        assert_eq!(Transfer::Direct.blocks(None, 0, 0), 1);

        let added = |form, bytes| Transfer::Direct.blocks(Some(form), bytes, 128);
        assert_eq!([1 << 19, 1 << 20].map(|bytes| added(Form::Whole, bytes)), [32, 64]);
        assert_eq!([8 << 20, 16 << 20].map(|bytes| added(Form::InParts, bytes)), [64, 128]);
    }

    #[test]
    fn launches_have_valid_links() {
        let links = Links::of_kinds(LinkKind::NvLink, LinkKind::Rdma);
        for transfer in Transfer::ALL {
            for blocks in [0, 1, 16, u32::MAX] {
                links.of_launches(transfer, Collective::AllGather, blocks).check().unwrap();
            }
        }
        let of = |transfer: Transfer| links.of_launches(transfer, Collective::AllGather, 128);
        let [tagged, direct] = Transfer::ALL.map(of);
        assert!(tagged.local.bytes_per_second < direct.local.bytes_per_second);
        assert!(tagged.local.flag_seconds < direct.local.flag_seconds);
    }
}
