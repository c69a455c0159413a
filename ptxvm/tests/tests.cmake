# The tests of the PTX machine. Included by tests/CMakeLists.txt.
if(NOT ACR_SANITIZE MATCHES thread) # it has one thread
  foreach(name unit_ptxvm unit_ptxvm_memory unit_ptxvm_matrix unit_ptxvm_races)
    test_program(${name} unit 120)
    target_link_libraries(${name} PRIVATE ptxvm)
  endforeach()
  add_executable(ptx_load ${CMAKE_CURRENT_LIST_DIR}/ptx_load.c)
  target_link_libraries(ptx_load PRIVATE ptxvm)
  register(ptx_load device 120 ptx_load ${ACR_IMAGES})
endif()
