//! Tests groups whose ranks are threads over the host backend.
//!
//! | module | shows |
//! | --- | --- |
//! | `all_gather` | all-gathers over one fabric, captured and not |
//! | `all_to_all_v` | all-to-alls whose starts have counts of their own |
//! | `awaits` | measures an awaited start beside one that blocks |
//! | `buffer_plan` | plans of buffers that share memory, and their windows |
//! | `channel` | one-sided messages between ranks |
//! | `closed_groups` | closed groups leave no descriptor and no memory behind; in a process of its own, because all of it counts |
//! | `deaths` | the death of a rank is told while a child of it lives; the ranks are processes, because they fork and end |
//! | `drivers` | the threads that look after groups are counted, in processes of their own |
//! | `files` | files of the caller that cannot be registered, and what a registered one shows |
//! | `group_end` | a caller that calls nothing else learns that its group has ended |
//! | `heap` | operations use the blocks of the heap again; with a limit of descriptors in a process of its own |
//! | `immediate` | calls on any memory that need no preparation, beside a model |
//! | `matrices` | ranges of columns of matrices, on engines with rows and without |
//! | `mixed` | measures a short operation behind a long one |
//! | `order` | ranks that make calls in different orders learn so, and late ranks are not blamed |
//! | `other_collectives` | all collectives but all-gathers and reductions |
//! | `reduction_shapes` | reductions of any length and place, of several tensors, and of lists |
//! | `reductions` | sums, products and extremes, bit by bit |
//! | `refusals` | a rank that refuses a call takes part in it, and the group goes on |
//! | `reopen` | groups open, end and open again at one address |
//! | `resize` | starts with lengths and places of their own |
//! | `shapes` | all-gathers of uneven blocks, lists, tensors and windows |
//! | `split` | groups that are split from a group; threads and descriptors are counted in a process of its own |
//! | `stopped_ranks` | nobody waits for a rank whose process is stopped; the ranks are processes |
//! | `tickets` | messages and signals of a channel are polled, awaited and waited for together |
//! | `tiers` | groups over two fabrics |
//! | `untyped` | operations whose element type is chosen at run time |
//! | `waiting` | futures, descriptors and limits, and who moves the bytes meanwhile |

mod all_gather;
mod all_to_all_v;
mod awaits;
mod buffer_plan;
mod channel;
mod closed_groups;
mod deaths;
mod drivers;
mod engines;
mod files;
mod group_end;
mod handles;
mod heap;
mod immediate;
mod matrices;
mod mixed;
mod order;
mod other_collectives;
mod reduction_shapes;
mod reductions;
mod refusals;
mod reopen;
mod resize;
mod shapes;
mod split;
mod stopped_ranks;
mod support;
mod tickets;
mod tiers;
mod untyped;
mod waiting;
