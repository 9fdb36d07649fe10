//! Describes the forms in which an all-reduce can run.

use serde::Serialize;

use crate::collective::Collective;
use crate::error::Error;
use crate::layout::BlockBytes;

/// How an all-reduce moves its data.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Form {
    /// Every rank sends its whole input to all others, and adds everything.
    Whole,
    /// Each rank adds one part, and passes it on to all others.
    InParts,
}

impl Form {
    /// Returns a short name of the form for tables.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Whole => "whole",
            Self::InParts => "in parts",
        }
    }

    /// Returns the collective that the plans of an all-reduce in this form execute.
    pub const fn collective(self) -> Collective {
        match self {
            // Every rank adds everything, as if it were the only receiver of a reduce-scatter.
            Self::Whole => Collective::ReduceScatter,
            Self::InParts => Collective::AllReduce,
        }
    }
}

/// One form of an operation, with the collective of its plans and the lengths of its blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FormBlocks {
    /// The form of an all-reduce; `None` for other collectives.
    pub form: Option<Form>,
    /// The collective that the plans execute.
    pub collective: Collective,
    /// The lengths of the blocks that the plans move.
    pub blocks: BlockBytes,
}

/// Returns the forms in which an operation can run, at least one.
///
/// `blocks` are those of the caller: in an all-reduce, each rank's whole input.
///
/// # Errors
/// [`InvalidArgument`](peerlane_hal::ErrorKind::InvalidArgument) if the lengths of an all-reduce
/// differ between ranks.
pub fn forms(
    collective: Collective,
    blocks: &BlockBytes,
    in_place: bool,
) -> Result<Vec<FormBlocks>, Error> {
    if collective != Collective::AllReduce {
        return Ok(vec![FormBlocks { form: None, collective, blocks: blocks.clone() }]);
    }

    let in_form = |form: Form, blocks| {
        let collective = form.collective();
        FormBlocks { form: Some(form), collective, blocks }
    };
    let parts = in_form(Form::InParts, blocks.parts()?);
    // In place, additions would overwrite what other lanes still send.
    Ok(if in_place { vec![parts] } else { vec![in_form(Form::Whole, blocks.clone()), parts] })
}
