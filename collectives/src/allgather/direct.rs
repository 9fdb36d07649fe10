//! Direct: every rank puts its shard to every peer.
//!
//! One lane for all peers; where a network reaches the other nodes, a second one for those, which
//! hears its arrivals itself. A peer's `ready` says that its output may be overwritten; where two
//! outputs are used in turn, its arrivals of the start before say so already. There is no barrier at
//! the end, because a push reads only the rank's own source, and the end of the lane gives that back.
//! Peers are served in shifted order, so that no two ranks push to the same peer first.
//!
//! With batched flags a lane is a few groups: all `ready` signals and waits, all puts, all
//! `arrived` signals and waits. The own copy stands with the puts, so that no group is cut.

use super::Task;
use super::peers::{Circle, circles};
use super::steps::{arrived, cells, own_copy, put, ready, signal, wait};
use crate::plan::{FlagOrder, Lane, LaneId, Source};

/// The lanes of one rank.
pub(super) fn lanes(task: &Task<'_>) -> Vec<Lane> {
    circles(task).iter().map(|circle| lane(task, circle)).collect()
}

fn lane(task: &Task<'_>, circle: &Circle) -> Lane {
    let &Task { rank, shape, .. } = task;
    let &Circle { lane, tier, ref served, ref serving } = circle;
    let says_ready = task.says_ready();
    let own_cells = || cells(rank, shape.parts);
    let own_copy = own_copy(task).filter(|_| lane == LaneId::HOME);
    let mut steps = Vec::new();
    if says_ready {
        steps.extend(served.iter().map(|&peer| signal(peer, ready(rank, lane))));
    }
    match shape.flags {
        FlagOrder::Prompt => {
            steps.extend(own_copy);
            for &peer in served {
                steps.extend(says_ready.then(|| wait(ready(peer, lane))));
                steps.extend(own_cells().flat_map(|cell| {
                    [put(peer, cell, Source::Input), signal(peer, arrived(cell, lane))]
                }));
            }
        }
        FlagOrder::Batched => {
            steps.extend(served.iter().filter(|_| says_ready).map(|&peer| wait(ready(peer, lane))));
            steps.extend(own_copy);
            let to_peers =
                || served.iter().flat_map(|&peer| own_cells().map(move |cell| (peer, cell)));
            steps.extend(to_peers().map(|(peer, cell)| put(peer, cell, Source::Input)));
            steps.extend(to_peers().map(|(peer, cell)| signal(peer, arrived(cell, lane))));
        }
    }
    for &peer in serving {
        steps.extend(cells(peer, shape.parts).map(|cell| wait(arrived(cell, lane))));
    }
    Lane { tier, steps }
}
