// Add two matrices of floats, row after row in memory.
//
// A GPU runs thousands of threads. Each one here computes one element. Threads
// are numbered within a block, and blocks within a grid; both have two
// dimensions, as the matrices do. The last blocks reach beyond the edges, hence
// the `if`.
#include <cuda_runtime.h>

// Threads with neighboring threadIdx.x run together, 32 at a time (a warp). Here
// they read neighboring columns: the GPU loads 128 bytes for all of them at once.
__global__ void add_rows(const float *a, const float *b, float *sum, int rows, int columns) {
    int row = blockIdx.y * blockDim.y + threadIdx.y;
    int column = blockIdx.x * blockDim.x + threadIdx.x;
    if (row < rows && column < columns) {
        size_t place = (size_t)row * columns + column;
        sum[place] = a[place] + b[place];
    }
}

// The same with rows and columns exchanged: neighboring threads read addresses a
// whole row apart. The sums are the same, and the memory works for nothing.
__global__ void add_columns(const float *a, const float *b, float *sum, int rows, int columns) {
    int row = blockIdx.x * blockDim.x + threadIdx.x;
    int column = blockIdx.y * blockDim.y + threadIdx.y;
    if (row < rows && column < columns) {
        size_t place = (size_t)row * columns + column;
        sum[place] = a[place] + b[place];
    }
}

#ifdef __CUDACC__
static unsigned blocks_for(int items, unsigned threads) {
    return ((unsigned)items + threads - 1) / threads;
}

// Python calls this. It starts the kernel and does not wait for its end. Returns
// 0, or CUDA's number of the error.
extern "C" int add(const float *a, const float *b, float *sum, int rows, int columns,
                   int by_columns, cudaStream_t stream) {
    dim3 threads(32, 8);  // 256 in a block
    if (by_columns) {
        dim3 blocks(blocks_for(rows, threads.x), blocks_for(columns, threads.y));
        add_columns<<<blocks, threads, 0, stream>>>(a, b, sum, rows, columns);
    } else {
        dim3 blocks(blocks_for(columns, threads.x), blocks_for(rows, threads.y));
        add_rows<<<blocks, threads, 0, stream>>>(a, b, sum, rows, columns);
    }
    return (int)cudaGetLastError();
}
#endif
