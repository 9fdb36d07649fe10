//! Hierarchical: every shard goes to one rank of each other node, which spreads it there.
//!
//! Lane 1 puts the own shard to one rank of every other node, and does not wait for anything else.
//! Home meanwhile spreads the own shard inside the node; then each part that arrives from another
//! node goes to the mates as soon as it is there. Nodes are served in shifted order, so a shard from
//! k nodes back is the k-th to come, and home waits in this order.
//!
//! With one node there is no lane 1; with one rank a node home has only arrivals. Neither is a case of
//! its own.
//!
//! With batched flags home has the `ready` signals and waits together, and the signals that announce
//! a part to all mates. Lane 1 announces every part at once also then: home can go on with it.

use peerlane_hal::Rank;

use super::Task;
use super::rails::{Rails, entry};
use super::steps::{BETWEEN, after, arrived, before, cells, own_copy, put, ready, signal, wait};
use crate::plan::{Cell, FlagOrder, Lane, LaneId, Source, Step, Tier};

/// The lanes of one rank, with its shard put to every node by itself.
pub(super) fn lanes(task: &Task<'_>) -> Vec<Lane> {
    lanes_with(task, between)
}

/// Home, and behind it what `between` makes where there are several nodes.
pub(super) fn lanes_with(
    task: &Task<'_>,
    between: impl FnOnce(&Task<'_>, &Rails<'_>) -> Vec<Step>,
) -> Vec<Lane> {
    let rails = Rails::new(task);
    let tier = if task.has_network() { Tier::Network } else { Tier::Local };
    let mut lanes = vec![Lane { tier: Tier::Local, steps: home(task, &rails) }];
    if rails.nodes() > 1 {
        lanes.push(Lane { tier, steps: between(task, &rails) });
    }
    lanes
}

fn between(task: &Task<'_>, rails: &Rails<'_>) -> Vec<Step> {
    let &Task { rank, shape, .. } = task;
    let asks = task.says_ready();
    let targets = || (1..rails.nodes()).map(|by| entry(rails.ahead(by), rails.at()));
    let mut steps = Vec::new();
    if asks {
        let sources = (1..rails.nodes()).flat_map(|by| rails.entering(by, rails.at()));
        steps.extend(sources.map(|source| signal(source, ready(rank, BETWEEN))));
    }
    if asks && shape.flags == FlagOrder::Batched {
        steps.extend(targets().map(|target| wait(ready(target, BETWEEN))));
    }
    for target in targets() {
        if asks && shape.flags == FlagOrder::Prompt {
            steps.push(wait(ready(target, BETWEEN)));
        }
        steps.extend(announced(target, cells(rank, shape.parts), Source::Input));
    }
    steps
}

/// Puts of cells to one peer, each announced at once.
fn announced(
    peer: Rank,
    cells: impl Iterator<Item = Cell>,
    from: Source,
) -> impl Iterator<Item = Step> {
    cells.flat_map(move |cell| [put(peer, cell, from), signal(peer, arrived(cell, LaneId::HOME))])
}

fn home(task: &Task<'_>, rails: &Rails<'_>) -> Vec<Step> {
    let &Task { rank, shape, .. } = task;
    let (mates, at, lane) = (rails.mates(), rails.at(), LaneId::HOME);
    let served = || after(mates.len(), at).map(|mate| mates[mate]);
    let mut steps = Vec::new();
    if task.says_ready() {
        steps.extend(served().map(|mate| signal(mate, ready(rank, lane))));
    }
    match shape.flags {
        FlagOrder::Prompt => {
            steps.extend(own_copy(task));
            for mate in served() {
                steps.extend(task.says_ready().then(|| wait(ready(mate, lane))));
                steps.extend(announced(mate, cells(rank, shape.parts), Source::Input));
            }
        }
        FlagOrder::Batched => {
            steps.extend(served().filter(|_| task.says_ready()).map(|m| wait(ready(m, lane))));
            steps.extend(own_copy(task));
            let to_mates = || served().flat_map(|m| cells(rank, shape.parts).map(move |c| (m, c)));
            steps.extend(to_mates().map(|(mate, cell)| put(mate, cell, Source::Input)));
            steps.extend(to_mates().map(|(mate, cell)| signal(mate, arrived(cell, lane))));
        }
    }
    for cell in entering(task, rails, at) {
        steps.push(wait(arrived(cell, lane)));
        match shape.flags {
            FlagOrder::Prompt => steps.extend(
                served().flat_map(|mate| announced(mate, [cell].into_iter(), Source::Output)),
            ),
            FlagOrder::Batched => {
                steps.extend(served().map(|mate| put(mate, cell, Source::Output)));
                steps.extend(served().map(|mate| signal(mate, arrived(cell, lane))));
            }
        }
    }
    let serving = before(mates.len(), at);
    for mate in serving.clone() {
        steps.extend(cells(mates[mate], shape.parts).map(|cell| wait(arrived(cell, lane))));
    }
    for mate in serving {
        steps.extend(entering(task, rails, mate).map(|cell| wait(arrived(cell, lane))));
    }
    steps
}

/// The cells from other nodes that enter at the mate of local index `at`, in the order in which they
/// come.
fn entering(task: &Task<'_>, rails: &Rails<'_>, at: usize) -> impl Iterator<Item = Cell> {
    let parts = task.shape.parts;
    (1..rails.nodes()).flat_map(move |by| {
        let shards = rails.entering(by, at);
        (0..parts).flat_map(move |part| shards.clone().map(move |shard| Cell { shard, part }))
    })
}
