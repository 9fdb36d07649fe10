//! Opens channels: each rank creates engines, and all take flags from the heap.

use std::marker::PhantomData;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use peerlane_hal::{
    CopyEngine, Deadline, DynEngine, EngineRequirements, ErrorKind, Fabric, LinkKind, Rank,
    Region as _, Space,
};

use super::notification::Watchers;
use super::sources::BytesInFlight;
use super::{Channel, ChannelReport, ChannelSide, invalid, words_of_rank};
use crate::element::Element;
use crate::error::Error;
use crate::group::Group;
use crate::group::agreement::{Offer, agree, encode};
use crate::group::heap::{Demand, FlagLanes, Pool, dropped_lists};
use crate::group::report::{Fallback, LaneReport, LinkReport};
use crate::group::runtime::Runtime;
use crate::group::segment::{Fabrics, Segment, connects};
use crate::group::window::{Extent, Inner, Window};
use crate::plan::{LaneId, Tier};
use crate::run::buffers::{
    DoubleBuffering, FlagRegions, OperationBuffers, OutputCounts, RankRegions, WORD_BYTES,
};
use crate::run::queue::{Queue, copies_rows};

impl Group {
    /// Opens a channel over a window, with `signals` signals from every rank to every rank.
    /// Collective.
    ///
    /// # Errors
    /// [`Mismatch`](ErrorKind::Mismatch), naming the rank and the field that differs;
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) if the window belongs to another group, the
    /// host of a rank holds a [slice](Window::slice) of it, or `signals` is 0;
    /// [`Unavailable`](ErrorKind::Unavailable) if the group is
    /// [strict](crate::group::GroupOptions::strict) and a link takes a slower path; the reason why
    /// the group has ended.
    pub fn channel<T: Element>(
        &mut self,
        window: &Window<T>,
        signals: usize,
    ) -> Result<Channel<T>, Error> {
        open(self, window, signals)
    }
}

/// Opens a channel, as [`Group::channel`].
fn open<T: Element>(
    group: &mut Group,
    window: &Window<T>,
    signals: usize,
) -> Result<Channel<T>, Error> {
    let len = window.len();
    let window = &window.inner;
    group.runtime.life.check()?;

    // It counts when the ranks have agreed. A rank that refuses the call does not know which count
    // would change.
    let number = group.channels + 1;
    let name = format!("channel {number}");

    let rank = group.rank();
    let ranks = group.ranks();
    let deadline = Deadline::after(group.timeout());
    let runtime = Arc::clone(&group.runtime);
    let tiers =
        Rank::all(ranks).map(|peer| tier_of(group.fabrics(), (rank, peer))).collect::<Box<[_]>>();

    // The use is added before the ranks agree, so that no slice is borrowed when the first message
    // of a peer arrives. If they do not agree, no rank has the channel and the use ends.
    let opened = check_open(&runtime, window, signals).and_then(|()| {
        let extent = Extent { window: window.number, bytes: 0..window.bytes(), writes: true };
        let used = group.users.add_channel(name.clone(), extent)?;
        let (engines, report) = engines(group, &tiers)?;
        Ok((used, engines, report))
    });

    let dropped = group.heap.dropped();
    let own_dropped = dropped.len();
    let offer = opened.as_ref().map_err(Error::clone).map(|_| {
        let offer = Offer::default().field("window", window.number).field("signals", signals);
        offer.blob(encode(&dropped))
    });
    let offers = agree(&runtime, &name, offer, deadline)?;
    group.channels = number;
    let (used, engines, report) = opened?;

    // A block of the heap is free when all ranks have dropped it, so all ranks free the same ones.
    group.heap.free_dropped(&dropped_lists(&offers)?, own_dropped);

    let is_tiered = group.setup.network.is_some();
    let signals = signals as u64;
    let words = (ranks as u64).saturating_mul(words_of_rank(signals));
    let bytes = words.saturating_mul(WORD_BYTES);

    // The sides below take the flags in the order of these demands.
    let used_tiers =
        [Tier::Local, Tier::Network].into_iter().filter(|tier| is_tiered || *tier == Tier::Local);
    let pool = |tier, captured| Pool::Flags { lanes: FlagLanes::Of(tier), polled: true, captured };
    let demands: Vec<Demand> = used_tiers
        .flat_map(|tier| [(pool(tier, false), bytes), (pool(tier, true), bytes)])
        .collect();
    let (allocation, flags) = group.take_blocks(&demands, deadline)?;
    // From here on, peers can put into the window, even if this rank fails.
    used.set_open();

    let id = next_id();
    let host_waits: Arc<[AtomicU32]> = (0..ranks).map(|_| AtomicU32::new(0)).collect();

    let mut flags = flags.into_iter();
    let mut sides = [None, None];
    for (tier, engine) in [Tier::Local, Tier::Network].into_iter().zip(engines) {
        let (Some(eager), Some(captured)) = (flags.next(), flags.next()) else { break };
        let Some(engine) = engine else { continue };

        let memory = memory_of(window, tier, [&eager, &captured], group.heap.epoch_base())?;
        let memory = Arc::new(memory);

        let on_host = window.region().space() == Space::Host;
        let copies_rows = copies_rows(engine.caps(), on_host);
        let backend = group.fabrics().of(tier)?.backend();
        let queue = Queue::new(engine, backend, Arc::clone(&memory))?;

        let side = Arc::new(ChannelSide {
            name: name.clone(),
            channel: id,
            rank,
            tier,
            queue: Mutex::new(queue),
            done: AtomicU64::new(0),
            memory,
            copies_rows,
            stream_waits: Mutex::default(),
            life: Arc::clone(&runtime.life),
            open: Arc::clone(runtime.driver.open_count()),
            is_open: AtomicBool::new(false),
            // One side reports them for both.
            host_waits: (tier == Tier::Local).then(|| Arc::clone(&host_waits)),
            is_watched: AtomicBool::new(false),
            watchers: Watchers::default(),
        });
        runtime.add_work(Arc::clone(&side) as _, None);
        sides[tier as usize] = Some(side);
    }

    let counts = ranks * (signals as usize + 1);
    Ok(Channel {
        name,
        rank,
        sides,
        tiers,
        window: Arc::clone(window),
        len,
        signals,
        given: vec![0; counts].into_boxed_slice(),
        awaited: (0..counts).map(|_| AtomicU64::new(0)).collect(),
        host_waits,
        in_flight: [BytesInFlight::default(), BytesInFlight::default()],
        next_look: 0,
        report,
        captures: false,
        allocation: Some(allocation),
        runtime,
        used: Some(used),
        elements: PhantomData,
    })
}

/// Returns a number that no other channel of the process has.
fn next_id() -> u64 {
    static LAST: AtomicU64 = AtomicU64::new(0);
    LAST.fetch_add(1, Ordering::Relaxed) + 1
}

/// Returns the memory of a channel on one fabric: the window, and the flags of the host and of
/// graphs.
fn memory_of(
    window: &Inner,
    tier: Tier,
    [eager, captured]: [&Segment; 2],
    epoch_base: u64,
) -> Result<OperationBuffers, Error> {
    let of_tier = |segment: &Segment, what| {
        let missing = || {
            Error::new(ErrorKind::Other, format!("the {what} is not registered with every fabric"))
        };
        segment.of(tier).cloned().ok_or_else(missing)
    };

    let flags = FlagRegions {
        eager: of_tier(eager, "memory of the signals")?,
        captured: Some(of_tier(captured, "memory of the signals in graphs")?),
    };

    // One output, which all messages use, and flags that start at the first word.
    let buffering = DoubleBuffering::new(OutputCounts { eager: 1, captured: 1 }, 0, 0)
        .expect("no bytes do not overflow");
    let keep = [&window.segment, eager, captured].into_iter().flat_map(|segment| segment.keep());

    Ok(OperationBuffers {
        inputs: Vec::new(),
        outputs: vec![of_tier(&window.segment, "window")?],
        inbox: RankRegions::default(),
        flags,
        cross_tier_flags: None,
        buffering,
        epoch_base,
        digest: None,
        _keep: keep.cloned().collect(),
    })
}

fn tier_of(fabrics: Fabrics<'_>, ranks: (Rank, Rank)) -> Tier {
    match connects(fabrics.topology, fabrics.network.is_some(), Tier::Local, ranks) {
        true => Tier::Local,
        false => Tier::Network,
    }
}

fn check_open(runtime: &Arc<Runtime>, window: &Inner, signals: usize) -> Result<(), Error> {
    if !Arc::ptr_eq(&window.runtime, runtime) {
        return Err(invalid(
            "the window belongs to another group; open it with this group".to_owned(),
        ));
    }

    if signals == 0 {
        return Err(invalid("signals is 0, expected at least 1".to_owned()));
    }
    Ok(())
}

/// Creates an engine on each fabric that connects this rank with a peer, and reports them.
fn engines(
    group: &mut Group,
    tiers: &[Tier],
) -> Result<([Option<DynEngine>; 2], ChannelReport), Error> {
    let rank = group.rank();
    let mut engines = [None, None];
    let mut lanes = Vec::new();

    let setup = &group.setup;
    let kind = setup.named_engine();
    for tier in [Tier::Local, Tier::Network] {
        let fabric = match (tier, &group.setup.network) {
            (Tier::Local, _) => &group.setup.fabric,
            (Tier::Network, Some(network)) if tiers.contains(&tier) => network,
            (Tier::Network, _) => continue,
        };

        let engine = fabric.engine(EngineRequirements {
            kind: kind.and_then(|engine| engine.kind(tier)),
            ..EngineRequirements::default()
        });
        let engine = engine.map_err(|error| Error::of_fabric("create an engine", error))?;
        let lane = LaneId(lanes.len() as u32);
        lanes.push(LaneReport::new(lane, tier, fabric.backend(), engine.caps()));
        engines[tier as usize] = Some(engine);
    }

    let fabrics = group.fabrics();
    let link = |(peer, &tier): (Rank, &Tier)| {
        let kind = fabrics.link(tier, peer)?.kind;
        Some(LinkReport { peer, tier, kind })
    };
    let links = Rank::all(tiers.len()).zip(tiers).filter(|(peer, _)| *peer != rank);

    let slow = links.filter_map(link).filter(|link| LinkKind::is_fallback(link.kind));
    let fallbacks: Vec<_> = slow.map(Fallback::Link).collect();
    if let Some(fallback) = fallbacks.first().filter(|_| group.setup.strict) {
        let text = format!("strict is set, but the channel needs a fallback: {fallback}");
        return Err(Error::new(ErrorKind::Unavailable, text));
    }

    Ok((engines, ChannelReport { lanes, fallbacks }))
}
