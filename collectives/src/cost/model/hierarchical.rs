//! Hierarchical, with rails direct or as rings: between nodes and inside them at the same time.

use super::{Task, Way};
use crate::cost::predict::Term;
use crate::cost::seen::{Seen, between};
use crate::cost::units::{bytes, rate, time};
use crate::plan::{Algorithm, Tier};

pub(super) fn way(task: &Task<'_>, node_ranks: u64) -> Way {
    let Task { ground, links, shape, .. } = *task;
    let tier = between(ground, shape.tiers);
    let own = Seen::new(links, None, node_ranks, node_ranks);
    let local = Seen::new(links, Some(Tier::Local), node_ranks, node_ranks);
    let network = Seen::new(links, Some(tier), node_ranks, node_ranks);
    let mates = node_ranks - 1;
    let rails = Rails::new(task, &network, node_ranks);

    let spread = spread(task, &local, mates, task.parts(), ground.shard_bytes_max);
    // What is spread came from another node.
    let cell = spread_cell(task, &local, mates)
        .saturating_add(local.passed_on(mates, task.part_bytes().saturating_mul(mates)));
    let entering = ground.entering(node_ranks);
    let forwards = spread_cells(cell, entering.saturating_mul(task.parts()));
    let copy = task.own_copy(&own);
    let copy_home = if own.by_processor { copy } else { 0 };

    // Both lanes ask for `ready`; only home has the own copy between.
    let ready_home = task.ready(&local, mates, Some(&own));
    let ready_network = task.ready(&network, rails.targets, None);
    // By the network: all parts come in, and the last of them are spread.
    let at_once = ground.entering_from_one(node_ranks);
    let tail = if rails.time > 0 { spread_cells(cell, at_once) } else { 0 };
    let go = if rails.time > 0 { own.hop } else { 0 };
    let by_network = ready_network + go + rails.time + rails.hop + tail;
    // By home: it begins with its own shard, or waits for the first part.
    let first = ready_network + go + rails.first + rails.hop;
    let home = ready_home + copy_home.saturating_add(spread);
    let by_home = if forwards > 0 { home.max(first).saturating_add(forwards) } else { home };
    // Both lanes on one fabric share what the rank can send.
    let sent = (entering + 1).saturating_mul(mates).saturating_add(rails.shards);
    let sent = local.sends(sent.saturating_mul(ground.shard_bytes_max));
    let by_home = if tier == Tier::Local { by_home.max(ready_home + sent) } else { by_home };
    let one_thread = local.by_processor && network.by_processor;
    let by_thread =
        if one_thread { ready_home + copy_home + rails.work + spread + forwards } else { 0 };

    let inside = format!("{} own, {} passed on", time(spread), time(forwards));
    let outside = format!(
        "{} × {} at {}",
        rails.puts,
        bytes(task.part_bytes()),
        rate(network.rate(rails.puts))
    );
    let longest = by_network.max(by_home).max(by_thread);
    let ready = if longest == by_network { ready_network } else { ready_home };
    let mut terms = vec![Term::new("ready", ready, format!("of {} peers", mates + rails.targets))];
    terms.push(match longest {
        _ if longest == by_thread => Term::new(
            "both lanes in turn",
            by_thread - ready,
            format!("{outside} between nodes; {inside}"),
        ),
        _ if longest == by_home => {
            let hidden = if rails.time > 0 {
                format!("; {outside} between nodes beside it")
            } else {
                String::new()
            };
            Term::new("puts inside the node", by_home - ready, format!("{inside}{hidden}"))
        }
        _ => Term::new(
            "puts between nodes",
            by_network - ready,
            format!("{outside}, the last spread in {}; inside {inside} beside it", time(tail)),
        ),
    });
    if !own.by_processor {
        terms.push(Term::new(
            "own copy",
            copy.saturating_sub(longest),
            "what is left beside the puts",
        ));
    }
    if mates > 0 {
        terms.push(Term::new("last arrival", local.hop, ""));
    }
    let local_puts = mates.saturating_mul(entering + 1).saturating_mul(task.parts());
    let host = (local_puts.saturating_mul(local.submit))
        .saturating_add(rails.puts.saturating_mul(network.submit))
        .saturating_add(task.own_puts().saturating_mul(own.submit));
    Way { terms, host }
}

/// The puts of one rank into other nodes.
#[derive(Default)]
struct Rails {
    targets: u64,
    shards: u64,
    puts: u64,
    /// The lane's own work.
    work: u64,
    /// The same with its waits, or as long as it takes a rank to receive.
    time: u64,
    /// The first part.
    first: u64,
    hop: u64,
}

impl Rails {
    fn new(task: &Task<'_>, seen: &Seen, node_ranks: u64) -> Self {
        let ground = task.ground;
        let others = ground.nodes - 1;
        if others == 0 {
            return Self::default();
        }
        let (parts, shard) = (task.parts(), ground.shard_bytes_max);
        let ring = task.algorithm == Algorithm::HierarchicalRing;
        // On rings a rank of a small node passes on all that enters at it.
        let entering = ground.entering(node_ranks);
        let shards = if ring { entering } else { others };
        let puts = shards.saturating_mul(parts);
        let flags =
            task.flags(seen, 1).saturating_mul(puts).saturating_mul(if ring { 3 } else { 1 });
        // On rings all but the own shard came from the node before.
        let foreign = shards - 1;
        let passed_on = match ring {
            true => seen.passed_on(foreign.saturating_mul(parts), shard.saturating_mul(foreign)),
            false => 0,
        };
        let work = seen
            .puts(puts, shard.saturating_mul(shards))
            .saturating_add(passed_on)
            .saturating_add(flags);
        let first = seen.puts(1, task.part_bytes());
        let bubble = if ring {
            let others_parts = first.saturating_mul(parts * entering.div_ceil(others) - 1);
            seen.hop.saturating_sub(others_parts).saturating_mul(others - 1)
        } else {
            0
        };
        let received = seen.receives(shard.saturating_mul(entering));
        let time = work.saturating_add(bubble).max(received);
        Self {
            targets: if ring { 1 } else { others },
            shards,
            puts,
            work,
            time,
            first,
            hop: seen.hop,
        }
    }
}

/// One part to all mates.
fn spread_cell(task: &Task<'_>, local: &Seen, mates: u64) -> u64 {
    if mates == 0 {
        return 0;
    }
    let bytes = task.part_bytes().saturating_mul(mates);
    let puts = local.puts(mates, bytes).max(local.receives(bytes));
    puts.saturating_add(task.flags(local, mates)).saturating_add(task.flags(local, 1))
}

fn spread_cells(cell: u64, cells: u64) -> u64 {
    cell.saturating_mul(cells)
}

/// The own shard to all mates.
fn spread(task: &Task<'_>, local: &Seen, mates: u64, parts: u64, shard: u64) -> u64 {
    let puts = mates.saturating_mul(parts);
    local.puts(puts, shard.saturating_mul(mates)).saturating_add(task.flags(local, puts))
}
