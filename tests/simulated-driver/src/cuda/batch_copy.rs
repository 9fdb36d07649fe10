//! Several copies in one call, in both forms of it.

use super::Cuda;
use crate::runtime::batch_copy::batch_copy;
use crate::runtime::call::enter;

batch_copy!(cuMemcpyBatchAsync, Cuda, enter, failed);
batch_copy!(cuMemcpyBatchAsync_v2, Cuda, enter);
