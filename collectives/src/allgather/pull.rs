//! Pull: every rank gets the shard of every peer.
//!
//! The lanes are those of the direct plan. A peer's `ready` says that its shard may be read. Nobody
//! else writes the own output, so two outputs in turn spare nothing, and `ready` stays. Nothing
//! arrives unasked: a rank knows by the end of its own lanes that it has got everything. But its
//! sources are read by others until each has said `taken`, so the lanes end with that.

use peerlane_hal::Rank;

use super::Task;
use super::peers::{Circle, circles};
use super::steps::{cells, own_copy, ready, signal, wait};
use crate::plan::{Flag, FlagOrder, Lane, LaneId, Source, Step};

/// The lanes of one rank.
pub(super) fn lanes(task: &Task<'_>) -> Vec<Lane> {
    circles(task).iter().map(|circle| lane(task, circle)).collect()
}

fn lane(task: &Task<'_>, circle: &Circle) -> Lane {
    let &Task { rank, shape, .. } = task;
    let &Circle { lane, tier, ref served, ref serving } = circle;
    let own_copy = own_copy(task).filter(|_| lane == LaneId::HOME);
    let taken = |by: Rank| Flag::Taken { by, lane };
    let gets = |peer: Rank| {
        cells(peer, shape.parts).map(move |cell| Step::Get { peer, cell, from: Source::Input })
    };
    let mut steps: Vec<Step> =
        serving.iter().map(|&peer| signal(peer, ready(rank, lane))).collect();
    match shape.flags {
        FlagOrder::Prompt => {
            steps.extend(own_copy);
            for &peer in served {
                steps.push(wait(ready(peer, lane)));
                steps.extend(gets(peer));
                steps.push(signal(peer, taken(rank)));
            }
        }
        FlagOrder::Batched => {
            steps.extend(served.iter().map(|&peer| wait(ready(peer, lane))));
            steps.extend(own_copy);
            steps.extend(served.iter().flat_map(|&peer| gets(peer)));
            steps.extend(served.iter().map(|&peer| signal(peer, taken(rank))));
        }
    }
    steps.extend(serving.iter().map(|&peer| wait(taken(peer))));
    Lane { tier, steps }
}
