//! Mutates plans at random.

use fastrand::Rng;
use peerlane_hal::Rank;
use peerlane_planning::plan::{Cell, Flag, Lane, LaneId, Plan, Source, Step, Tier};

pub(crate) type Mutation = fn(&mut [Plan], &mut Rng) -> Option<String>;

const MUTATIONS: &[Mutation] = &[
    drop_step,
    duplicate_step,
    swap_neighbours,
    swap_neighbours_everywhere,
    move_within_lane,
    move_to_other_lane,
    retarget_peer,
    change_cell,
    change_flag,
    change_source,
    change_direction,
    change_tier,
    add_flag,
    swap_additions,
    reverse_additions,
    delay_first_addition,
    advance_own_addition,
    flip_in_place,
    change_chunks,
    change_outputs,
];

/// Changes `plans` once, and returns a description.
pub(crate) fn mutate(plans: &mut [Plan], rng: &mut Rng) -> String {
    loop {
        let mutation = rng.choice(MUTATIONS).unwrap();
        let before = plans.to_vec();
        if let Some(text) = mutation(plans, rng)
            && before != plans
        {
            return text;
        }
    }
}

/// The position of a step.
#[derive(Clone, Copy, Debug)]
struct StepPosition {
    rank: usize,
    lane: usize,
    at: usize,
}

fn position(plans: &[Plan], rng: &mut Rng) -> Option<StepPosition> {
    let rank = rng.usize(..plans.len());
    let lane = rng.usize(..plans[rank].lanes.len());
    let steps = plans[rank].lanes[lane].steps.len();
    (steps > 0).then(|| StepPosition { rank, lane, at: rng.usize(..steps) })
}

fn steps(plans: &mut [Plan], position: StepPosition) -> &mut Vec<Step> {
    &mut plans[position.rank].lanes[position.lane].steps
}

fn drop_step(plans: &mut [Plan], rng: &mut Rng) -> Option<String> {
    let position = position(plans, rng)?;
    let step = steps(plans, position).remove(position.at);
    Some(format!("drop {step:?} at {position:?}"))
}

fn duplicate_step(plans: &mut [Plan], rng: &mut Rng) -> Option<String> {
    let position = position(plans, rng)?;
    let steps = steps(plans, position);
    let to = rng.usize(position.at..=steps.len());
    steps.insert(to, steps[position.at]);
    Some(format!("duplicate {position:?} to {to}"))
}

fn swap_neighbours(plans: &mut [Plan], rng: &mut Rng) -> Option<String> {
    let position = position(plans, rng)?;
    let steps = steps(plans, position);
    let other = (position.at + 1) % steps.len();
    steps.swap(position.at, other);
    Some(format!("swap {position:?} with {other}"))
}

fn swap_neighbours_everywhere(plans: &mut [Plan], rng: &mut Rng) -> Option<String> {
    let position = position(plans, rng)?;
    for plan in plans {
        let steps = &mut plan.lanes[position.lane].steps;
        if position.at + 1 < steps.len() {
            steps.swap(position.at, position.at + 1);
        }
    }
    Some(format!("swap {position:?} with the next in every rank"))
}

fn move_within_lane(plans: &mut [Plan], rng: &mut Rng) -> Option<String> {
    let position = position(plans, rng)?;
    let steps = steps(plans, position);
    let step = steps.remove(position.at);
    let to = rng.usize(..=steps.len());
    steps.insert(to, step);
    Some(format!("move {position:?} to {to}"))
}

fn move_to_other_lane(plans: &mut [Plan], rng: &mut Rng) -> Option<String> {
    let position = position(plans, rng)?;
    let mut step = steps(plans, position).remove(position.at);
    let to_lane = rng.usize(..=plans[position.rank].lanes.len());
    if to_lane == plans[position.rank].lanes.len() {
        plans.iter_mut().for_each(|plan| plan.lanes.push(Lane::default()));
    }
    let lanes = &mut plans[position.rank].lanes;
    let to = rng.usize(..=lanes[to_lane].steps.len());
    if let Step::Wait {
        flag:
            Flag::Ready { lane, .. }
            | Flag::Free { lane, .. }
            | Flag::Arrived { lane, .. }
            | Flag::Contributed { lane, .. }
            | Flag::Taken { lane, .. },
    } = &mut step
        && rng.bool()
    {
        *lane = LaneId(u32::try_from(to_lane).unwrap());
    }
    lanes[to_lane].steps.insert(to, step);
    Some(format!("move {position:?} to lane {to_lane} at {to}"))
}

fn retarget_peer(plans: &mut [Plan], rng: &mut Rng) -> Option<String> {
    let position = position(plans, rng)?;
    let to = any_rank(plans, rng);
    match &mut steps(plans, position)[position.at] {
        Step::Put { peer, .. } | Step::Get { peer, .. } | Step::Signal { peer, .. } => *peer = to,
        Step::Reduce { from, .. } => *from = to,
        Step::Wait { .. } => return None,
    }
    Some(format!("retarget {position:?} to {to}"))
}

fn change_cell(plans: &mut [Plan], rng: &mut Rng) -> Option<String> {
    let position = position(plans, rng)?;
    let to = any_cell(plans, rng);
    match &mut steps(plans, position)[position.at] {
        Step::Put { cell, .. }
        | Step::Get { cell, .. }
        | Step::Reduce { cell, .. }
        | Step::Signal {
            flag: Flag::Arrived { cell, .. } | Flag::Contributed { cell, .. }, ..
        }
        | Step::Wait { flag: Flag::Arrived { cell, .. } | Flag::Contributed { cell, .. } } => {
            *cell = to;
        }
        _ => return None,
    }
    Some(format!("cell {to} in {position:?}"))
}

fn change_flag(plans: &mut [Plan], rng: &mut Rng) -> Option<String> {
    let position = position(plans, rng)?;
    let to = any_flag(plans, rng);
    match &mut steps(plans, position)[position.at] {
        Step::Signal { flag, .. } | Step::Wait { flag } => *flag = to,
        Step::Put { .. } | Step::Get { .. } | Step::Reduce { .. } => return None,
    }
    Some(format!("{to:?} in {position:?}"))
}

fn change_source(plans: &mut [Plan], rng: &mut Rng) -> Option<String> {
    let position = position(plans, rng)?;
    let (Step::Put { from, .. } | Step::Get { from, .. }) =
        &mut steps(plans, position)[position.at]
    else {
        return None;
    };
    *from = if *from == Source::Input { Source::Output } else { Source::Input };
    Some(format!("other source in {position:?}"))
}

/// A get instead of a put, or the other way round.
fn change_direction(plans: &mut [Plan], rng: &mut Rng) -> Option<String> {
    let position = position(plans, rng)?;
    let step = &mut steps(plans, position)[position.at];
    *step = match *step {
        Step::Put { peer, cell, from } => Step::Get { peer, cell, from },
        Step::Get { peer, cell, from } => Step::Put { peer, cell, from },
        Step::Reduce { .. } | Step::Signal { .. } | Step::Wait { .. } => return None,
    };
    Some(format!("other direction in {position:?}"))
}

/// Changes the tier of a lane on all ranks, or on one.
fn change_tier(plans: &mut [Plan], rng: &mut Rng) -> Option<String> {
    let tier = *rng.choice(Tier::ALL)?;
    let lanes = plans.iter().map(|plan| plan.lanes.len()).min()?;
    let lane = rng.usize(..lanes);
    if rng.bool() {
        plans.iter_mut().for_each(|plan| plan.lanes[lane].tier = tier);
        return Some(format!("lane {lane} of all ranks is {tier}"));
    }
    let plan = rng.choice(plans)?;
    plan.lanes[lane].tier = tier;
    Some(format!("lane {lane} of rank {} is {tier}", plan.rank))
}

/// Adds a flag between two random steps, with its signal and its wait.
fn add_flag(plans: &mut [Plan], rng: &mut Rng) -> Option<String> {
    let (signal, wait) = (position(plans, rng)?, position(plans, rng)?);
    let lane = LaneId(u32::try_from(wait.lane).unwrap());
    let flag = match any_flag(plans, rng) {
        Flag::Ready { from, .. } => Flag::Ready { from, lane },
        Flag::Free { from, .. } => Flag::Free { from, lane },
        Flag::Arrived { cell, .. } => Flag::Arrived { cell, lane },
        Flag::Contributed { cell, .. } => Flag::Contributed { cell, lane },
        Flag::Taken { by, .. } => Flag::Taken { by, lane },
        other => other,
    };
    let peer = Rank::at(wait.rank);
    steps(plans, signal).insert(signal.at, Step::Signal { peer, flag });
    steps(plans, wait).insert(wait.at, Step::Wait { flag });
    Some(format!("add {flag:?} from {signal:?} to {wait:?}"))
}

/// Mutations that change nothing but the order of the additions to one chunk.
pub(crate) const ORDERS: [Mutation; 4] =
    [swap_additions, reverse_additions, delay_first_addition, advance_own_addition];

/// Gives the additions to one chunk, of which there are at least two, another order.
fn reorder_additions(
    plans: &mut [Plan],
    rng: &mut Rng,
    change: impl FnOnce(&mut Vec<Step>, Rank, &mut Rng),
) -> Option<String> {
    let position = position(plans, rng)?;
    let rank = plans[position.rank].rank;
    let chunk = rng.u32(..plans[0].chunks.max(1));
    let steps = steps(plans, position);
    let adds = |at: &usize| matches!(steps[*at], Step::Reduce { cell, .. } if cell.chunk == chunk);
    let places: Vec<usize> = (0..steps.len()).filter(adds).collect();
    if places.len() < 2 {
        return None;
    }

    let mut additions: Vec<Step> = places.iter().map(|&at| steps[at]).collect();
    change(&mut additions, rank, rng);
    for (&at, addition) in places.iter().zip(additions) {
        steps[at] = addition;
    }
    Some(format!("other order of additions to chunk {chunk} of rank {rank}"))
}

fn swap_additions(plans: &mut [Plan], rng: &mut Rng) -> Option<String> {
    reorder_additions(plans, rng, |additions, _, rng| {
        let first = rng.usize(1..additions.len());
        additions.swap(first - 1, first);
    })
}

fn reverse_additions(plans: &mut [Plan], rng: &mut Rng) -> Option<String> {
    reorder_additions(plans, rng, |additions, _, _| additions.reverse())
}

fn delay_first_addition(plans: &mut [Plan], rng: &mut Rng) -> Option<String> {
    reorder_additions(plans, rng, |additions, _, _| additions.rotate_left(1))
}

/// Moves the own contribution to the front or, if it is there already, to the end.
fn advance_own_addition(plans: &mut [Plan], rng: &mut Rng) -> Option<String> {
    reorder_additions(plans, rng, |additions, rank, _| {
        let is_own = |step: &Step| matches!(step, Step::Reduce { from, .. } if *from == rank);
        match additions.iter().position(is_own) {
            Some(0) => additions.rotate_left(1),
            Some(own) => additions[..=own].rotate_right(1),
            None => {}
        }
    })
}

fn flip_in_place(plans: &mut [Plan], rng: &mut Rng) -> Option<String> {
    let plan = rng.choice(plans)?;
    plan.in_place = !plan.in_place;
    Some(format!("in_place of rank {}", plan.rank))
}

fn change_chunks(plans: &mut [Plan], rng: &mut Rng) -> Option<String> {
    let plan = rng.choice(plans)?;
    plan.chunks = rng.u32(0..=4);
    Some(format!("{} chunks of rank {}", plan.chunks, plan.rank))
}

/// Changes the number of outputs, or of inboxes of a reduction, on all ranks or on one.
fn change_outputs(plans: &mut [Plan], rng: &mut Rng) -> Option<String> {
    if plans[0].collective.is_reduction() && rng.bool() {
        return change_inboxes(plans, rng);
    }

    let outputs = rng.u32(0..=3);
    if rng.bool() {
        plans.iter_mut().for_each(|plan| plan.outputs = outputs);
        return Some(format!("{outputs} outputs of all ranks"));
    }
    let plan = rng.choice(plans)?;
    plan.outputs = outputs;
    Some(format!("{outputs} outputs of rank {}", plan.rank))
}

fn change_inboxes(plans: &mut [Plan], rng: &mut Rng) -> Option<String> {
    let inboxes = rng.u32(0..=3);
    if rng.bool() {
        plans.iter_mut().for_each(|plan| plan.inboxes = inboxes);
        return Some(format!("{inboxes} inboxes of all ranks"));
    }
    let plan = rng.choice(plans)?;
    plan.inboxes = inboxes;
    Some(format!("{inboxes} inboxes of rank {}", plan.rank))
}

/// Mostly a rank that there is.
fn any_rank(plans: &[Plan], rng: &mut Rng) -> Rank {
    Rank::at(rng.usize(..plans.len()) + usize::from(rng.u8(..8) == 0))
}

fn any_cell(plans: &[Plan], rng: &mut Rng) -> Cell {
    let chunk = rng.u32(..plans[0].chunks.max(1)) + u32::from(rng.u8(..8) == 0);
    Cell { block: any_rank(plans, rng), chunk }
}

fn any_flag(plans: &[Plan], rng: &mut Rng) -> Flag {
    let lane = LaneId(rng.u32(..3));
    match rng.u8(..7) {
        0 => Flag::Go { lane },
        1 => Flag::Sent { lane },
        2 => Flag::Free { from: any_rank(plans, rng), lane },
        3 => Flag::Ready { from: any_rank(plans, rng), lane },
        4 => Flag::Taken { by: any_rank(plans, rng), lane },
        5 if plans[0].collective.is_reduction() => {
            Flag::Contributed { cell: any_cell(plans, rng), lane }
        }
        _ => Flag::Arrived { cell: any_cell(plans, rng), lane },
    }
}
