//! Defines the collectives that commands plan, simulate and measure.

use clap::Args;
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use peerlane::collective::Collective;
use peerlane::group::BlockLens;
use peerlane::{Error, ErrorKind, Rank};
use peerlane_planning::cost::{Form, Transfer};
use peerlane_planning::layout::{BlockBytes, Layout, Lengths};

use crate::error::{Failure, Result};

/// A collective together with the choice between equal and different block lengths.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Goal {
    pub(crate) collective: Collective,
    /// Whether each pair of ranks has a block length of its own, as in an all-to-all-v.
    pub(crate) is_by_pair: bool,
    /// The form of an all-reduce that the user names. If it is whole, `collective` is that of its
    /// plans.
    pub(crate) form: Option<Form>,
}

/// The maximum number of ranks of a collective with a length for each pair. These lengths take 128
/// MiB.
const RANKS_BY_PAIR_MAX: usize = 4096;

const BY_PAIR: Goal = Goal { collective: Collective::AllToAll, is_by_pair: true, form: None };

/// The options that select the collective of a plan, a simulation or a prediction.
#[derive(Args, Clone, Debug)]
pub(crate) struct GoalOptions {
    /// Select the collective
    #[arg(long, default_value = "all-gather", value_name = "NAME", value_parser = parser(Goal::all()))]
    collective: Goal,
    #[command(flatten)]
    root: RootOption,
    /// Set the form of an all-reduce, either whole (every rank adds everything) or in-parts (each
    /// rank adds one part and passes it on) [default: the faster one in `explain`, otherwise
    /// in-parts]
    #[arg(long, value_name = "FORM", value_parser = form_parser())]
    form: Option<Form>,
}

/// Returns the name of a form on the command line.
pub(crate) fn form_name(form: &Form) -> &'static str {
    match form {
        Form::Whole => "whole",
        Form::InParts => "in-parts",
    }
}

#[derive(Args, Clone, Copy, Debug)]
pub(crate) struct RootOption {
    /// Set the rank that the others send to (gather, reduce) or receive from (broadcast, scatter),
    /// such as 2
    #[arg(long, default_value_t = 0, value_name = "RANK")]
    root: u32,
}

pub(crate) fn parser(goals: impl Iterator<Item = Goal>) -> impl TypedValueParser<Value = Goal> {
    let values = goals.map(|goal| PossibleValue::new(goal.name()).help(goal.about()));
    let find = |name: String| Goal::all().find(|goal| goal.name() == name);
    PossibleValuesParser::new(values).map(move |name| find(name).expect("one of the names"))
}

pub(crate) fn form_parser() -> impl TypedValueParser<Value = Form> {
    let forms = [Form::Whole, Form::InParts];
    let names = forms.iter().map(form_name);
    let find = move |name: String| forms.into_iter().find(|form| form_name(form) == name);
    PossibleValuesParser::new(names).map(move |name| find(name).expect("one of the names"))
}

/// Returns a parser for the ways in which the data of fused starts moves.
pub(crate) fn transfer_parser() -> impl TypedValueParser<Value = Transfer> {
    let find = |name: String| Transfer::ALL.into_iter().find(|one| one.name() == name);
    PossibleValuesParser::new(Transfer::ALL.map(Transfer::name))
        .map(move |name| find(name).expect("one of the names"))
}

impl Goal {
    pub(crate) fn all() -> impl Iterator<Item = Self> {
        let of = |collective: Collective| Self { collective, is_by_pair: false, form: None };
        Collective::ALL.iter().copied().map(of).chain([BY_PAIR])
    }

    pub(crate) fn name(self) -> &'static str {
        match self.form {
            Some(Form::Whole) => Collective::AllReduce.name(),
            _ if self.is_by_pair => "all-to-all-v",
            _ => self.collective.name(),
        }
    }

    /// Returns the name of the collective, with its root if it has one.
    pub(crate) fn text(self) -> String {
        match self.form {
            Some(form) => format!("{}, {}", self.name(), form.name()),
            None if self.is_by_pair => self.name().to_owned(),
            None => self.collective.to_string(),
        }
    }

    fn about(self) -> &'static str {
        match self.is_by_pair {
            true => "an all-to-all with blocks of different lengths",
            false => self.collective.summary(),
        }
    }

    pub(crate) fn takes_lengths(self) -> bool {
        let collective = self.collective;
        let has_blocks =
            collective.has_input_block_per_receiver() || collective.has_output_block_per_provider();

        self.is_by_pair || collective.lengths_may_differ() && has_blocks
    }

    /// Returns whether the output of a rank is a single block that is as long as an input, as in a
    /// broadcast.
    pub(crate) fn is_one_block(self) -> bool {
        let collective = self.collective;
        let reduces_to_one = collective.is_reduction() && collective.only_receiver().is_some();
        let broadcasts = collective.has_equal_outputs() && collective.only_provider().is_some();

        broadcasts || reduces_to_one || collective.contributes_whole_input()
    }

    pub(crate) fn with_root(self, RootOption { root }: RootOption) -> Result<Self> {
        if root != 0 && self.collective.root().is_none() {
            let name = self.collective.with_article();
            let text = format!("--root is {root}, but the collective is {name}, which has no root");
            let rooted = Self::all().filter(|goal| goal.collective.root().is_some());
            let names = rooted.map(Self::name).collect::<Vec<_>>().join(", ");
            let advice = format!("remove the option, or use a collective with a root: {names}");
            return Err(Failure::usage(text).with_advice(advice));
        }
        Ok(Self { collective: self.collective.with_root(Rank(root)), ..self })
    }

    /// Returns the goal in a form that the user names, which only an all-reduce out of place has.
    fn with_form(self, form: Option<Form>, in_place: bool) -> Result<Self> {
        let Some(form) = form else { return Ok(self) };
        let name = form_name(&form);
        if self.collective != Collective::AllReduce {
            let text = format!("--form is {name}, but only an all-reduce has forms");
            return Err(Failure::usage(text).with_advice("remove the option"));
        }
        if form == Form::Whole && in_place {
            let text = "--form whole and --in-place cannot be used together";
            return Err(Failure::usage(text).with_advice("in place, use --form in-parts"));
        }

        Ok(self.in_form(form))
    }

    pub(crate) fn check_root(self, ranks: usize) -> Result<Self> {
        match self.collective.root().filter(|root| root.index() >= ranks) {
            Some(root) => {
                let text = format!("--root is {root}, expected a rank below {ranks}");
                Err(Failure::usage(text))
            }
            None => Ok(self),
        }
    }

    /// Returns the layout of blocks whose lengths are given in bytes, by tensor and rank.
    pub(crate) fn layout(
        self,
        lengths: &[Vec<u64>],
        chunks: u32,
    ) -> std::result::Result<Layout, Error> {
        let ranks = lengths[0].len();
        if self.is_by_pair && ranks > RANKS_BY_PAIR_MAX {
            let text = format!(
                "{} of {ranks} ranks, expected at most {RANKS_BY_PAIR_MAX}, because each pair of ranks has a length",
                self.name()
            );
            return Err(Error::new(ErrorKind::InvalidArgument, text));
        }

        if self.form == Some(Form::Whole) {
            let input = lengths[0].iter().fold(0, |sum, part| u64::saturating_add(sum, *part));
            let blocks = BlockBytes::by_rank(&vec![input; ranks])?;
            let layout = Layout::of_blocks(self.collective, blocks, chunks)?;
            return Ok(layout.with_shared_input());
        }

        let tensor = |lengths: &Vec<u64>| Lengths::by_rank(lengths);
        let blocks = if self.is_by_pair {
            let row =
                |rank| Lengths::by_rank(&by_peer(&lengths[0], rank, |from, to| to + ranks - from));
            BlockBytes::ByPair((0..ranks).map(row).collect::<std::result::Result<_, _>>()?)
        } else {
            BlockBytes::ByTensor(lengths.iter().map(tensor).collect::<std::result::Result<_, _>>()?)
        };
        Layout::of_blocks(self.collective, blocks, chunks)
    }

    /// Returns the goal in each form in which a group can execute it.
    pub(crate) fn forms(self, in_place: bool) -> Vec<Self> {
        if self.collective != Collective::AllReduce || self.form.is_some() {
            return vec![self];
        }

        let forms: &[Form] =
            if in_place { &[Form::InParts] } else { &[Form::Whole, Form::InParts] };
        forms.iter().map(|&form| self.in_form(form)).collect()
    }

    fn in_form(self, form: Form) -> Self {
        Self { collective: form.collective(), form: Some(form), ..self }
    }

    /// Returns the block lengths as `rank` passes them to the library.
    pub(crate) fn lens(self, lengths: &[Vec<usize>], rank: Rank) -> BlockLens {
        let (ranks, rank) = (lengths[0].len(), rank.index());
        match lengths {
            [lengths] if self.is_by_pair => BlockLens::send_receive(
                &by_peer(lengths, rank, |from, to| to + ranks - from),
                &by_peer(lengths, rank, |to, from| to + ranks - from),
            ),
            // Each block is the part that a rank adds.
            [lengths] if self.collective == Collective::AllReduce => {
                BlockLens::from(lengths.iter().sum::<usize>())
            }
            [lengths] => lengths.into(),
            tensors => BlockLens::tensors(tensors),
        }
    }
}

/// Selects one length for each peer by the distance from rank p to rank q, which is (q - p) modulo
/// the number of ranks.
fn by_peer<T: Copy>(lengths: &[T], rank: usize, number: impl Fn(usize, usize) -> usize) -> Vec<T> {
    (0..lengths.len()).map(|peer| lengths[number(rank, peer) % lengths.len()]).collect()
}

impl GoalOptions {
    pub(crate) fn goal(&self, ranks: usize, in_place: bool) -> Result<Goal> {
        self.collective.with_root(self.root)?.check_root(ranks)?.with_form(self.form, in_place)
    }
}
