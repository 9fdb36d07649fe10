//! Chooses the engines, the form, the algorithm and the chunks of an operation by predicted times.
//!
//! Every rank chooses by itself, from values that are equal on all ranks.

use std::borrow::Cow;

use peerlane_hal::ErrorKind;

use super::fused::{self, FusedPlan};
use super::request::{Method, OperationSpec};
use crate::cost::{self, Choice, Form, Links, Question};
use crate::error::Error;
use crate::group::engines::{EngineKind, check_engine, links_of};
use crate::plan::Algorithm;
use crate::schedule::{Shape, schedule};
use crate::topology::Topology;

/// Returns whether the engines of an operation must support streams, if the backend has any.
pub(super) fn needs_streams(spec: &OperationSpec) -> bool {
    spec.capturable || !spec.any_engine
}

/// The kinds of engines that an operation can use, and those that it cannot.
pub(super) struct UsableEngines<'a> {
    pub(super) engines: Vec<&'a EngineKind>,
    pub(super) refused: Vec<(String, String)>,
}

impl<'a> UsableEngines<'a> {
    /// Selects among the kinds that all ranks offer, by values that are equal on all ranks.
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) if the caller names a kind that not all
    /// ranks offer, and [`Unavailable`](ErrorKind::Unavailable) if none is left.
    pub(super) fn new(
        spec: &OperationSpec,
        (engines, failed): (&'a [EngineKind], &[(String, String)]),
        ranks: (&Topology, bool),
    ) -> Result<Self, Error> {
        let named = spec.method.engine.as_deref();
        if let Some(name) = named {
            check_engine(name, engines)?;
        }

        let mut usable = Self { engines: Vec::new(), refused: failed.to_vec() };
        usable.engines.extend(engines.iter().filter(|engine| {
            let is_failed = failed.iter().any(|(kind, _)| kind == engine.name());
            !is_failed && named.is_none_or(|name| engine.is_named(name))
        }));
        usable.refuse_unfit(spec, ranks, named.is_some());

        let has_streams = |engine: &&&EngineKind| engine.has_streams();
        let can_capture = engines.iter().find(|engine| engine.has_streams());
        if let (Some(name), Some(other)) = (named, can_capture)
            && spec.capturable
            && usable.engines.iter().find(has_streams).is_none()
        {
            let text = format!(
                "engine is {name:?}, whose engines have no streams, expected {:?} for an operation \
                 that is capturable",
                other.name()
            );
            return Err(Error::new(ErrorKind::InvalidArgument, text));
        }

        // What the caller names is used even without what is only preferred.
        if named.is_none() {
            let gets_only = spec.method.algorithm.is_some_and(|one| schedule(one).gets);
            let has_gets = |engine: &EngineKind| engine.common.gets;
            let lack = "its engines have no streams";
            usable.prefer(needs_streams(spec), EngineKind::has_streams, lack);
            usable.prefer(gets_only, has_gets, "its engines have no gets");
            // Additions occupy compute units in any case, up to a limit.
            let takes_no_units = |engine: &EngineKind| {
                engine.common.copy_blocks == 0
                    || engine.is_fused() && spec.collective.is_reduction()
            };
            let lack = "its copies would occupy compute units";
            usable.prefer(spec.beside_compute, takes_no_units, lack);
        }

        if usable.engines.is_empty() {
            let reasons = usable.refused.iter().map(|(kind, why)| format!("{kind}: {why}"));
            let reasons = reasons.collect::<Vec<_>>().join("; ");
            let text = format!("no kind of engines is left for the operation: {reasons}");
            return Err(Error::new(ErrorKind::Unavailable, text));
        }
        Ok(usable)
    }

    /// Removes the kinds whose starts would be fused, if those of the operation cannot be.
    fn refuse_unfit(&mut self, spec: &OperationSpec, ranks: (&Topology, bool), is_named: bool) {
        self.engines.retain(|engine| {
            let limits = engine.common.fused;
            let why = limits.and_then(|limits| fused::unfit(spec, limits, ranks, is_named));
            let refused = why.map(|why| (engine.name().to_owned(), why.to_owned()));
            let is_fit = refused.is_none();
            self.refused.extend(refused);
            is_fit
        });
    }

    /// Removes the kinds that lack something, if it is needed and another kind has it.
    fn prefer(&mut self, is_needed: bool, has: impl Fn(&EngineKind) -> bool, lack: &str) {
        if !is_needed || !self.engines.iter().any(|engine| has(engine)) {
            return;
        }

        let lacking = self.engines.iter().filter(|engine| !has(engine));
        let lacking: Vec<_> =
            lacking.map(|engine| (engine.name().to_owned(), lack.to_owned())).collect();
        self.refused.extend(lacking);
        self.engines.retain(|engine| has(engine));
    }
}

/// What a plan must have, and what it may use.
#[derive(Clone, Copy)]
pub(super) struct Needs {
    /// Everything but the number of chunks.
    pub(super) shape: Shape,
    capturable: bool,
    /// Whether the engines of both tiers can get.
    gets: bool,
    /// Whether blocks of different ranks are neighbors in the output, unless a rank has a list.
    has_neighbors: bool,
    /// Whether puts wait for blocks of the input to depart.
    departs: bool,
    /// Whether the own block returns over the link from a peer to which it was put.
    returns_own_block: bool,
    /// The number of lanes whose engines can run at the same time.
    lanes_max: u32,
}

impl Needs {
    pub(super) fn new(spec: &OperationSpec, shape: Shape, engine: &EngineKind) -> Self {
        let common = &engine.common;
        Self {
            shape,
            capturable: spec.capturable,
            gets: common.gets,
            has_neighbors: has_neighbors(spec),
            departs: spec.handles.departures,
            returns_own_block: spec.beside_compute && !shape.in_place,
            lanes_max: common
                .resident_blocks_max
                .checked_div(common.copy_blocks)
                .unwrap_or(u32::MAX),
        }
    }
}

/// Returns whether blocks of different ranks are neighbors in the output, as far as all ranks know.
///
/// A rank does not know whether others give a list of destinations, so lists do not count.
fn has_neighbors(spec: &OperationSpec) -> bool {
    spec.lens.tensor_count() == 1 && spec.columns.is_none()
}

/// A form of an operation with engines of one kind.
pub(super) struct Variant<'a> {
    pub(super) form: Option<Form>,
    pub(super) fused: Option<FusedPlan>,
    /// The average length of each rank's blocks in bytes.
    pub(super) block_bytes: Vec<u64>,
    pub(super) engine: &'a EngineKind,
    pub(super) needs: Needs,
}

/// Returns the variant, algorithm and chunks that `method` asks for, or those with the shortest
/// predicted time.
pub(super) fn choose(
    method: &Method,
    topology: &Topology,
    variants: &[Variant<'_>],
    refused_engines: &[(String, String)],
) -> Result<Choice, Error> {
    let refused: Vec<_> =
        variants.iter().map(|variant| variant.refused(method, topology.nodes())).collect();

    let links: Vec<_> = variants.iter().map(|variant| variant.links(method)).collect();

    let variants = variants.iter().zip(&links).zip(&refused);
    let variants = variants.map(|((variant, (links, measured)), refused)| {
        let question = Question {
            topology,
            block_bytes: &variant.block_bytes,
            shape: variant.needs.shape,
            links,
            measured: *measured,
            algorithm: variant.algorithm(method),
            chunks: variant.fused.map(|fused| fused.chunks).or(method.chunks),
            refused,
        };
        let transfer = variant.fused.map(|fused| fused.transfer);
        cost::Variant { engine: variant.engine.name(), form: variant.form, transfer, question }
    });
    cost::choose_among(&variants.collect::<Vec<_>>(), refused_engines)
}

impl Variant<'_> {
    /// Returns the link rates, and whether they were measured.
    fn links<'l>(&'l self, method: &'l Method) -> (Cow<'l, Links>, bool) {
        let Some(FusedPlan { transfer, blocks, .. }) = self.fused else {
            let (links, measured) = match links_of(&method.links, self.engine.name()) {
                Some(links) => (links, true),
                None => (self.engine.links(), self.engine.is_measured()),
            };
            let more = self.engine.common.captured_seconds;
            if !self.needs.capturable || more == 0.0 {
                return (Cow::Borrowed(links), measured);
            }

            let start_seconds = links.start_seconds + more;
            return (Cow::Owned(Links { start_seconds, ..links.clone() }), measured);
        };
        let collective = self.needs.shape.collective;
        let links = self.engine.links().of_launches(transfer, collective, blocks);
        (Cow::Owned(links), self.engine.is_measured())
    }

    /// Returns the algorithm that the caller names, or the one that stands in for it.
    fn algorithm(&self, method: &Method) -> Option<Algorithm> {
        match method.algorithm {
            // Direct moves the same bytes, with the engines of the other ranks.
            Some(one) if !self.needs.gets && schedule(one).gets => Some(Algorithm::Direct),
            other => other,
        }
    }

    /// Returns the algorithms that the operation cannot use, unless the caller names one.
    fn refused(&self, method: &Method, nodes: usize) -> Vec<(Algorithm, &'static str)> {
        let algorithm = self.algorithm(method);
        if algorithm.is_some() && algorithm == method.algorithm {
            return Vec::new();
        }

        if let Some(fused) = self.fused {
            let others = Algorithm::ALL.iter().filter(|one| **one != fused.algorithm);
            return others.map(|one| (*one, "its starts are not fused")).collect();
        }

        let (links, measured) = self.links(method);
        refused(&self.needs, nodes, &links, measured)
    }
}

/// Returns the algorithms that the operation cannot use, or that would not be as fast as estimated.
fn refused(
    needs: &Needs,
    nodes: usize,
    links: &Links,
    measured: bool,
) -> Vec<(Algorithm, &'static str)> {
    let &Needs { shape, capturable, gets, has_neighbors, returns_own_block, lanes_max, .. } = needs;
    let in_graph = capturable && !shape.tiers;

    let reason = |algorithm| {
        let schedule = schedule(algorithm);
        if schedule.gets && !gets {
            return Some("not all engines of this rank have gets");
        }
        if schedule.gets && needs.departs {
            return Some("its peers read the input, of which blocks depart one after the other");
        }
        if schedule.gets && returns_own_block {
            return Some("beside compute, the own block returns over the link from a put");
        }
        if schedule.joins_blocks && !has_neighbors {
            return Some("blocks of different ranks are not neighbors in the output");
        }
        if (schedule.lane_count)(nodes, shape.tiers) as u64 > u64::from(lanes_max) {
            return Some("the engines of its lanes do not fit on the device at the same time");
        }
        // Assumed rates are not good enough to leave what is the best wherever it was measured.
        let is_assumed =
            nodes == 1 && !measured && (schedule.needs_measurements)(shape.collective, links);
        if in_graph && (schedule.lane_count)(nodes, shape.tiers) > 1 {
            return Some("one of its lanes cannot be recorded into a graph");
        }
        is_assumed.then_some("no links were measured")
    };
    let all = Algorithm::ALL.iter();
    all.filter_map(|&algorithm| Some((algorithm, reason(algorithm)?))).collect()
}

#[cfg(test)]
mod tests {
    use peerlane_hal::{LinkKind, Rank};

    use super::*;
    use crate::collective::Collective;
    use crate::cost::Transfer;
    use crate::layout::{BlockBytes, Layout};

    fn known() -> Links {
        Links::of_kinds(LinkKind::NvLink, LinkKind::Rdma)
    }

    fn needs(shape: Shape) -> Needs {
        Needs {
            shape,
            capturable: false,
            gets: true,
            has_neighbors: true,
            departs: false,
            returns_own_block: false,
            lanes_max: u32::MAX,
        }
    }

    /// Chooses with engines of one kind, whose links are given and measured or not.
    fn chosen(
        method: &Method,
        topology: &Topology,
        block_bytes: &[u64],
        needs: Needs,
        (links, measured): (&Links, bool),
    ) -> Choice {
        let engine = EngineKind::of_links("streams", links.clone(), measured);
        let block_bytes = block_bytes.to_vec();
        let variant = Variant { form: None, fused: None, block_bytes, engine: &engine, needs };
        choose(method, topology, &[variant], &[]).unwrap()
    }

    fn decided(method: &Method, nodes: &[u32], block_bytes: u64) -> (Algorithm, u32) {
        let topology = Topology::of_nodes(nodes).unwrap();
        let blocks = vec![block_bytes; nodes.len()];
        let shape = Shape { tiers: topology.nodes() > 1, ..Shape::default() };
        let choice = chosen(method, &topology, &blocks, needs(shape), (&known(), false));
        (choice.algorithm, choice.chunks)
    }

    #[test]
    fn what_is_left_open_is_chosen_and_what_is_said_is_kept() {
        let open = Method::default();
        for bytes in [0, 341, 64 << 20] {
            assert_eq!(decided(&open, &[0], bytes), (Algorithm::Direct, 1));
            assert_eq!(decided(&open, &[0; 3], bytes), (Algorithm::Direct, 1));
        }
        let (algorithm, chunks) = decided(&open, &[0, 0, 0, 0, 1, 1, 1, 1], 64 << 20);
        assert!(algorithm == Algorithm::Hierarchical && chunks > 1, "{algorithm}, {chunks}");
        let links = vec![known()];
        let ring = Method { algorithm: Some(Algorithm::Ring), links, ..open.clone() };
        assert_eq!(decided(&ring, &[0; 4], 64 << 20).0, Algorithm::Ring);
        let both = Method { algorithm: Some(Algorithm::Ring), chunks: Some(3), ..open };
        assert_eq!(decided(&both, &[0; 4], 64 << 20), (Algorithm::Ring, 3));
    }

    #[test]
    fn short_all_reduces_add_everything_on_every_rank() {
        let links = [LinkKind::SharedMemory, LinkKind::NvLink];
        let links = links.map(|local| Links::of_kinds(local, LinkKind::Rdma));
        let longest = |nodes: &[u32]| {
            let topology = Topology::of_nodes(nodes).unwrap();
            let tiers = topology.nodes() > 1;
            let whole = |power: u32, links: &Links| {
                let engine = EngineKind::of_links("streams", links.clone(), false);
                let blocks = BlockBytes::by_rank(&vec![1 << power; nodes.len()]).unwrap();
                let forms = cost::forms(Collective::AllReduce, &blocks, false).unwrap();
                let variants = forms.into_iter().map(|form| {
                    let shape = Shape { collective: form.collective, tiers, ..Shape::default() };
                    let layout = Layout::of_blocks(form.collective, form.blocks, 1).unwrap();
                    let block_bytes = layout.average_blocks();
                    let (form, needs) = (form.form, needs(shape));
                    Variant { form, fused: None, block_bytes, engine: &engine, needs }
                });
                let variants: Vec<_> = variants.collect();
                let choice = choose(&Method::default(), &topology, &variants, &[]).unwrap();
                choice.form == Some(Form::Whole)
            };
            links.each_ref().map(|links| (0..30).take_while(|power| whole(*power, links)).last())
        };
        let found = [&[0][..], &[0; 2], &[0; 4], &[0; 8], &[0, 0, 0, 0, 1, 1, 1, 1]].map(longest);
        // Powers of two, on shared memory and on NVLink. One rank alone moves nothing.
        let expected = [[29, 29], [13, 24], [11, 21], [11, 21], [13, 18]];
        assert_eq!(found, expected.map(|one| one.map(Some)));
    }

    #[test]
    fn short_all_reduces_are_tagged() {
        let topology = Topology::of_nodes(&[0; 4]).unwrap();
        let engine = EngineKind::of_links("kernels", known(), false);
        let is_tagged = |power: u32| {
            let blocks = BlockBytes::by_rank(&[1 << power; 4]).unwrap();
            let forms = cost::forms(Collective::AllReduce, &blocks, false).unwrap();
            let variants = forms.into_iter().flat_map(|form| {
                let shape = Shape { collective: form.collective, inboxes: 2, ..Shape::default() };
                let layout = Layout::of_blocks(form.collective, form.blocks, 1).unwrap();
                let block_bytes = layout.average_blocks();
                let (form, needs) = (form.form, needs(shape));
                let suits = move |transfer: &Transfer| {
                    *transfer == Transfer::Direct
                        || form == Some(Form::Whole) && transfer.suits(1 << power, 64)
                };
                let variant = |transfer: Transfer| {
                    let blocks = transfer.blocks(form, 1 << power, 64);
                    let fused = Some(FusedPlan::of_blocks(transfer, blocks));
                    let block_bytes = block_bytes.clone();
                    Variant { form, fused, block_bytes, engine: &engine, needs }
                };
                Transfer::ALL.into_iter().filter(suits).map(variant).collect::<Vec<_>>()
            });
            let variants: Vec<_> = variants.collect();
            let choice = choose(&Method::default(), &topology, &variants, &[]).unwrap();
            choice.transfer == Some(Transfer::Tagged)
        };
        assert_eq!((0..24).take_while(|power| is_tagged(*power)).last(), Some(18));
    }

    /// The root of a broadcast sends parts where it would send long blocks to several ranks.
    #[test]
    fn the_root_of_a_long_broadcast_sends_parts() {
        let engine = EngineKind::of_links("kernels", known(), false);
        let in_parts = |ranks: u32, power: u32| {
            let topology = Topology::of_nodes(&vec![0; ranks as usize]).unwrap();
            let collective = Collective::Broadcast { root: Rank(0) };
            let needs = needs(Shape { collective, outputs: 2, ..Shape::default() });
            let block_bytes = vec![1 << power; ranks as usize];
            let variant = |fused| {
                let block_bytes = block_bytes.clone();
                Variant { form: None, fused: Some(fused), block_bytes, engine: &engine, needs }
            };

            let direct = FusedPlan::of_blocks(Transfer::Direct, 64);
            let (algorithm, chunks) = (Algorithm::ScatterAllGather, ranks - 1);
            let mut parts = direct;
            (parts.algorithm, parts.chunks) = (algorithm, chunks);
            let variants = [variant(direct), variant(parts)];
            let choice = choose(&Method::default(), &topology, &variants, &[]).unwrap();
            choice.algorithm == Algorithm::ScatterAllGather
        };
        let least = |ranks| (10..30).find(|power| in_parts(ranks, *power));
        assert_eq!([3, 4, 8].map(least), [Some(21), Some(20), Some(19)]);
    }

    #[test]
    fn the_links_decide() {
        let nodes = [0, 0, 0, 0, 1, 1, 1, 1];
        let of = |links| {
            let algorithm = Some(Algorithm::Hierarchical);
            decided(&Method { algorithm, links, ..Method::default() }, &nodes, 8 << 20).1
        };
        let mut links = known();
        assert!(of(vec![links.clone()]) > 1);
        links.local.put_seconds = 1.0;
        assert_eq!(of(vec![links]), 1, "what is put at a second a piece is not cut");
    }

    #[test]
    fn engines_without_gets_put_instead() {
        let topology = Topology::of_nodes(&[0; 4]).unwrap();
        let method = Method { algorithm: Some(Algorithm::Pull), ..Method::default() };
        let of = |gets| {
            let needs = Needs { gets, ..needs(Shape::default()) };
            chosen(&method, &topology, &[64; 4], needs, (&known(), true))
        };
        assert_eq!(of(true).algorithm, Algorithm::Pull);
        assert_eq!(of(false).algorithm, Algorithm::Direct);
        assert!(of(false).explain().contains("not all engines of this rank have gets"));
    }

    #[test]
    fn beside_compute_no_algorithm_is_chosen_that_only_gets() {
        let topology = Topology::of_nodes(&[0; 4]).unwrap();
        let method = Method::default();
        let needs = Needs { returns_own_block: true, ..needs(Shape::default()) };
        let choice = chosen(&method, &topology, &[64 << 20; 4], needs, (&known(), true));
        assert_ne!(choice.algorithm, Algorithm::Pull);
        assert!(choice.explain().contains("beside compute"), "{choice}");
    }

    #[test]
    fn a_graph_gets_a_plan_of_one_lane() {
        let topology = Topology::of_nodes(&[0, 0, 0, 0, 1, 1, 1, 1]).unwrap();
        let choose = |measured| {
            let needs = Needs { capturable: true, ..needs(Shape::default()) };
            let (method, links) = (Method::default(), known());
            chosen(&method, &topology, &[64 << 20; 8], needs, (&links, measured))
        };
        for choice in [choose(false), choose(true)] {
            assert!(choice.explain().contains("cannot be recorded into a graph"), "{choice}");
            assert!(matches!(choice.algorithm, Algorithm::Direct | Algorithm::Ring), "{choice}");
        }
    }

    /// Engines whose copies start late are worth it only for long copies.
    #[test]
    fn the_kind_of_engines_depends_on_the_size() {
        let slow = Links::of_kinds(LinkKind::Xgmi, LinkKind::Rdma);
        let mut late = slow.clone();
        late.start_seconds += 1e-4;
        late.local.bytes_per_second *= 2.0;
        late.local.engine_bytes_per_second *= 2.0;
        late.local.send_bytes_per_second *= 2.0;
        late.local.receive_bytes_per_second *= 2.0;
        let engines = [("streams", slow), ("sdma", late)];
        let engines = engines.map(|(name, links)| EngineKind::of_links(name, links, false));

        let topology = Topology::flat(4).unwrap();
        let chosen = |bytes: u64| {
            let variants = engines.each_ref().map(|engine| {
                let needs = needs(Shape::default());
                Variant { form: None, fused: None, block_bytes: vec![bytes; 4], engine, needs }
            });
            choose(&Method::default(), &topology, &variants, &[]).unwrap()
        };
        assert_eq!([1 << 10, 64 << 20].map(|bytes| chosen(bytes).engine), ["streams", "sdma"]);
        let text = chosen(1 << 10).explain();
        assert!(text.contains("by streams") && text.contains("by sdma"), "{text}");
    }
}
